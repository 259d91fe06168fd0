"""Many prompts at once: a JSON line in, a JSON line out, in order, each as soon as those before it are done."""

from collections.abc import Sequence
from time import perf_counter

from forerun.cli.options import fix_seed
from forerun.cli.prompts import Asked, Template
from forerun.cli.report import answer_dict, summary
from forerun.cli.terminal import note, print_json
from forerun.engine.llm import LLM
from forerun.errors import EngineError, OptionError, RequestError
from forerun.types import SpeculationStats


def answer_all(requests: Sequence[Asked], template: Template, llm: LLM, load_s: float) -> None:
    """Answer all requests in one batch. Raises OptionError, naming the line, before anything runs."""
    requests = [asked._replace(params=fix_seed(asked.params)) for asked in requests]
    jobs = []
    for asked in requests:
        try:
            jobs.append(llm.submit(template.encode(llm, asked.prompt), asked.params))
        except RequestError as error:
            raise OptionError(f"{asked.where}: {error}") from error
    started = perf_counter()
    stats, failed = SpeculationStats(), []
    for asked, job in zip(requests, jobs, strict=True):
        while job.output is None:
            llm.step()
        document = answer_dict(job.output, llm, asked.params, load_s)
        if asked.params.temperature > 0:
            document["seed"] = asked.params.seed
        print_json({"id": asked.id, **document} if asked.id is not None else document)
        stats += job.output.speculation
        failed += [asked.where] if job.output.finish_reason == "error" else []
    speed = stats.emitted / (perf_counter() - started)
    note(summary(stats, llm.config, None, speed=speed, num_answers=len(jobs)))
    if failed:
        raise EngineError(f"{len(failed)} of {len(jobs)} answers failed, the first that of {failed[0]}")
