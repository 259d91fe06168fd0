"""The nets as data, and the loading of their weights and tokenizers. No torch here."""
