"""The loop: plan, propose, extend, verify, commit. No I/O, no clock, no tokenizer, no threads below `llm`."""
