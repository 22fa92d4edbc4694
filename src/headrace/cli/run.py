"""``headrace run``: run a project, or keep the views of one pipeline file right."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

import click

from headrace.cli.options import (
    Command,
    counted,
    json_option,
    lasting,
    log_option,
    open_log,
    outcome,
    project_option,
    talk,
)
from headrace.errors import BadUsage, InputChanged

if TYPE_CHECKING:
    from headrace.pipelines.views.run import Progress

STARTED = time.monotonic()


@click.command(
    cls=Command,
    short_help="Run a project, or keep the views of one pipeline file right.",
    example="headrace run",
)
@click.argument("file", required=False)
@click.option("--once", is_flag=True, help="With FILE: end when all that is there is taken in.")
@project_option
@log_option
@json_option
def run(file: str | None, once: bool, folder: str, path: str, as_json: bool) -> None:
    """Run the project of this folder, until it is interrupted; or only the pipeline of FILE.

    A project is what headrace.toml names: captures, pipelines, what they keep up to date, the page.
    Each part is a process that is started again when it fails. With FILE, the views of that file
    are kept right in the log of --log, woken by each append.
    """
    if file is None:
        _run_project(folder, once=once, as_json=as_json)
        return
    from headrace.pipelines.files import load_pipeline
    from headrace.pipelines.spark import archive_in_background
    from headrace.pipelines.views.run import Runner

    with open_log(path) as log:
        pipeline = load_pipeline(file)
        through, commits = None, 0
        while through is None:
            with Runner(pipeline, log, report=_shown if not as_json else None) as runner:
                if runner.build is not None and not as_json:
                    talk(f"building {', '.join(runner.build.views)}")
                try:
                    through = runner.run("caught up")
                    ready = time.monotonic() - STARTED
                    if not once:
                        if not as_json:
                            views, after = counted(len(pipeline.views), "view"), lasting(ready)
                            talk(f"{views} of '{pipeline.name}' caught up {after} after start")
                        archive_in_background()
                        through = runner.run(None)
                except KeyboardInterrupt:
                    through = runner.status.through
                except InputChanged as changed:  # once more, with the columns that it has now
                    through = None
                    if not as_json:
                        talk(f"{changed.fact}; the views are read anew")
                commits += runner.commits
        done = {
            "pipeline": pipeline.name,
            "through": through,
            "commits": commits,
            "seconds": round(time.monotonic() - STARTED, 3),
        }
    words = f"'{pipeline.name}' is through {through}, {counted(commits, 'commit')}"
    outcome(done, words, as_json=as_json)


def _run_project(folder: str, *, once: bool, as_json: bool) -> None:
    from headrace.runtime.project import find_project
    from headrace.runtime.supervisor import Supervisor

    if once:
        raise BadUsage("--once goes with a FILE", fix="headrace run FILE --once")
    project = find_project(folder)

    def said(text: str) -> None:
        seconds = round(time.monotonic() - STARTED, 2)
        if as_json:
            click.echo(json.dumps({"seconds": seconds, "said": text}, ensure_ascii=False))
        else:
            talk(f"{seconds:7.2f} s  {text}")

    if not as_json:
        talk(f"project '{project.name}'; 'headrace status --watch' shows it, Ctrl-C stops it")
    Supervisor(project, said).run()
    if not as_json:
        talk(f"stopped; the data is in {project.log}")


def _shown(progress: Progress) -> None:
    """Progress on a terminal only."""
    if not sys.stderr.isatty():
        return
    left = lasting(progress.seconds_left)
    text = f"{progress.rows:,} of {progress.of:,} rows, {progress.rate:,.0f} a second, {left} left"
    end = "\n" if progress.rows >= progress.of else ""
    click.echo(f"\r\x1b[K{text}{end}", err=True, nl=False)
