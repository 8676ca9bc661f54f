"""Progress on the terminal: downloads, prompts with their rate and the time left.

Where standard error is no terminal a line per finished prompt is written instead of a bar.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

Tick = Callable[[dict[str, Any]], None]


class Progress:
    """What a point shows while it runs."""

    def __init__(self, console: Console | None = None, label: str = ""):
        self.console = console or Console(stderr=True)
        self.label = label

    def say(self, text: str) -> None:
        """One line about the point."""
        self.console.print(f"{self.label}{text}", highlight=False, soft_wrap=True, markup=False)

    @contextmanager
    def prompts(self, name: str, total: int) -> Iterator[Tick]:
        """A bar over `total` prompts; call the yielded function with each finished record."""
        title = f"{self.label}{name}"
        if not self.console.is_terminal:
            yield self._lines(title, total)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Bars(*columns, console=self.console) as bars:
            bar = bars.add_task(title, total=total, rate="")

            def tick(record: dict[str, Any]) -> None:
                bars.update(bar, advance=1, rate=_rate(record))

            yield tick

    def _lines(self, title: str, total: int) -> Tick:
        done = 0

        def tick(record: dict[str, Any]) -> None:
            nonlocal done
            done += 1
            where = f"{record['task']} {record['length']} #{record['index']}"
            self.console.print(
                f"{title} {done}/{total}  {where}  score {record['score']:.2f}  {_rate(record)}",
                highlight=False,
                soft_wrap=True,
            )

        return tick

    @contextmanager
    def download(self) -> Iterator[Callable[[str, int, int], None]]:
        """Bars by stage; the yielded function takes (stage, bytes done, bytes in all)."""
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        bars = Bars(*columns, TimeElapsedColumn(), console=self.console)
        started: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            bars.start()  # only now: most runs have nothing to download
            if stage not in started:
                started[stage] = bars.add_task(stage, total=total or None)
            bars.update(started[stage], completed=done)

        try:
            yield report
        finally:
            if started:
                bars.stop()


def _rate(record: dict[str, Any]) -> str:
    return f"{record['prompt_tokens'] / record['prefill_s']:.0f} tok/s prefill"
