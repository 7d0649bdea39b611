"""The command generate."""

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import tyro

from langevin.cli.evaluate import WithSampling
from langevin.cli.tables import check_file, console_for
from langevin.errors import UsageError
from langevin.sampling.text import Text
from langevin.settings import check_count, check_seed


@dataclass(frozen=True)
class Generate(WithSampling):
    """Write texts with a run's best model, as they come.

    A prompt and a seed give the same text in any batch. langevin generate RUN --help has the options of the
    run's objective, such as orders, steps and gaps to fill.

    Example: langevin generate runs/x --prompt "Once upon a time" "The dog" --samples 3
    """

    run_folder: tyro.conf.Positional[Path]
    """A run folder."""
    prompt: tuple[str, ...] = ()
    """One or more beginnings; none: from nothing."""
    samples: int = 1
    """Texts for each prompt."""
    seed: int = 0
    """Of the first sample; each further one takes the next number."""
    batch: int = 16
    """Texts written at the same time."""
    checkpoint: str = "best"
    """best: the model with the lowest validation loss; last; or the number of a step that was kept."""
    device: str = "auto"
    json: bool = False
    """Print JSON when all are done."""
    watch: bool = False
    """Show how the first text appears, where the terminal can."""
    html: Path | None = None
    """Write a page that plays how the texts appeared."""

    def __call__(self) -> int:
        self.sampling.check()
        for name in ("samples", "batch"):
            check_count(name, getattr(self, name))
        for seed in (self.seed, self.seed + self.samples - 1):
            check_seed(seed)
        check_file(self.html)
        if self.watch and self.json:
            raise UsageError("--watch and --json both write to the output", "Give one of them.")
        from rich.console import Console
        from rich.status import Status
        from transformers import TextStreamer

        from langevin.environment import pick_device
        from langevin.runs import load
        from langevin.sampling.text import Step
        from langevin.sampling.watch import Live, pieces, player, up_to

        device = pick_device(self.device)
        run = load(self.run_folder, checkpoint=self.checkpoint)
        write = run.objective.sampler()
        if not run.task.used_by:
            raise UsageError(f"a run of the task {run.task.name} has no words to write", "Use evaluate.")
        seeds = range(self.seed, self.seed + self.samples)
        requests = self.sampling.requests(self.prompt, seeds)
        watching: dict[str, Any] = {}
        live: Live | None = None
        if self.watch or self.html:
            if "watched" not in signature(write).parameters:
                raise UsageError(
                    f"texts of the objective {run.objective.name} appear word by word",
                    "Leave out --watch and --html.",
                )
            decode = pieces(run.tokenizer)
            traces: list[list[Step]] = [[] for _ in requests]

            def watched(index: int, step: Step) -> None:
                traces[index].append(step)
                if live is not None and index == 0:
                    live.show(step)

            watching = {"watched": watched}
            if self.watch and (terminal := Console(highlight=False)).is_terminal:
                live = Live(decode, terminal)
        streams = len(requests) == 1 and not self.json and live is None
        status = Status("", console=Console(stderr=True))
        console = console_for(stderr=True)

        def stepped(texts: range, tokens: int) -> None:
            which = f"{texts.start + 1} to {texts.stop} of {len(requests)}"
            status.update(f"texts {which}: {tokens} tokens")

        def finished(index: int, text: Text) -> None:
            run.keep_sample(text.as_dict())
            if watching and text.ended == "stop":
                traces[index][-1] = up_to(traces[index][-1], decode, text.text)
                if live is not None and index == 0:
                    live.last = traces[index][-1]
            if streams:
                status.stop()
            elif not self.json and (live is None or index):
                if live is None:
                    status.stop()
                print(f"--- {text.prompt!r}, seed {text.seed}\n{text.text}", flush=True)
                if live is None:
                    status.start()

        shown = status if not streams or "watched" in signature(write).parameters else nullcontext()
        with live or shown:
            texts = write(
                run.model.to(device),
                run.tokenizer,
                requests,
                self.sampling,
                data=run.environment["data"],
                context=run.config.context,
                batch=self.batch,
                streamer=TextStreamer(run.tokenizer, skip_special_tokens=True) if streams else None,
                finished=finished,
                stepped=stepped,
                note=lambda text: console.print(text, style="dim"),
                **watching,
            )
        if self.html is not None:
            default = asdict(type(self.sampling)())
            changed = {k: v for k, v in asdict(self.sampling).items() if v != default[k]}
            facts = {"run": self.run_folder.name, **changed, "seed": self.seed}
            self.html.write_text(player(traces, decode, "How texts appeared", facts), encoding="utf-8")
            console.print(f"The page is {self.html}")
        if self.json:
            print(json.dumps([text.as_dict() for text in texts], indent=2))
        return 0
