"""``headrace run``: keep the views of a pipeline file right."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

import click

from headrace.cli.options import Command, counted, json_option, lasting, log_option, open_log, talk

if TYPE_CHECKING:
    from headrace.pipelines.views.run import Progress

STARTED = time.monotonic()


@click.command(
    cls=Command,
    short_help="Keep the views of a pipeline file right.",
    example="headrace run shop.py --once",
)
@click.argument("file")
@click.option("--once", is_flag=True, help="End when everything that is there now is taken in.")
@log_option
@json_option
def run(file: str, once: bool, path: str, as_json: bool) -> None:
    """Run the pipeline that FILE defines, woken by each append, until it is interrupted.

    A new view, or one whose definition changed, is built first, while the others go on.
    """
    from headrace.pipelines.files import load_pipeline
    from headrace.pipelines.spark import archive_in_background
    from headrace.pipelines.views.run import Runner

    with open_log(path) as log:
        pipeline = load_pipeline(file)
        with Runner(pipeline, log, report=_shown if not as_json else None) as runner:
            if runner.build is not None and not as_json:
                talk(f"building {', '.join(runner.build.views)}")
            try:
                through = runner.run("caught up")
                ready = time.monotonic() - STARTED
                if not once:
                    if not as_json:
                        views = counted(len(pipeline.views), "view")
                        talk(f"{views} of '{pipeline.name}' caught up {lasting(ready)} after start")
                    archive_in_background()
                    through = runner.run(None)
            except KeyboardInterrupt:
                through = runner.status.through
            done = {
                "pipeline": pipeline.name,
                "through": through,
                "commits": runner.commits,
                "seconds": round(time.monotonic() - STARTED, 3),
            }
    if as_json:
        click.echo(json.dumps(done))
    else:
        talk(f"'{pipeline.name}' is through {through}, {counted(runner.commits, 'commit')}")


def _shown(progress: Progress) -> None:
    """Progress on a terminal only."""
    if not sys.stderr.isatty():
        return
    left = lasting(progress.seconds_left)
    text = f"{progress.rows:,} of {progress.of:,} rows, {progress.rate:,.0f} a second, {left} left"
    end = "\n" if progress.rows >= progress.of else ""
    click.echo(f"\r\x1b[K{text}{end}", err=True, nl=False)
