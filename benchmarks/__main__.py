"""Command line: `python -m benchmarks COMMAND`.

Exit status: 0 done; 2 usage (one line on stderr, nothing written); 11 a case failed; 130 interrupted (what was
measured is kept); the gate's own answers besides.
"""

import importlib
import os
import sys

import typer

COMMANDS = {
    "step": "Time forward, backward and optimizer of a language model's training step.",
    "attention": "Time attention implementations beside their peers.",
    "collective": "Time collectives over ranks against payload.",
    "parallel": "Time data-parallel variants beside torch's.",
    "memory": "Where the bytes of a step go.",
    "profile": "Where the milliseconds of a step go.",
    "precision": "What a precision does to values and dtypes.",
    "plan": "Predict memory and step time of a model on up to 100,000 devices.",
    "run": "Measure cases of a tier and keep the rows.",
    "adopt": "File rows measured where git does not travel under their commit.",
    "gate": "Compare two sets of results and name what regressed.",
    "report": "Make tables and the page from results.",
    "doctor": "Say what this machine can run, and why not the rest.",
}


INTERRUPTED = 130


def build() -> typer.Typer:
    """The application; each command lives in `benchmarks/commands/<name>.py` as a function of its name."""
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
    for name, summary in COMMANDS.items():
        function = getattr(importlib.import_module(f"benchmarks.commands.{name}"), name)
        app.command(name, help=summary)(function)
    return app


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit status."""
    from benchmarks.cases.registries import ROOT

    # The checkout's own trainstep, whatever is installed; `run --source` goes in front of it.
    sys.path.insert(0, str(ROOT / "src"))
    try:
        status = build()(args=arguments, standalone_mode=False, prog_name="python -m benchmarks")
        if status == INTERRUPTED:  # typer's answer to a KeyboardInterrupt
            print("interrupted", file=sys.stderr)
        return status if isinstance(status, int) else 0
    except BrokenPipeError:
        # The reader of our output has gone; flushing at exit must not complain about it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: cannot use {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except Exception as error:
        # typer's own usage errors; their class moved between versions, their shape did not.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            said = error.format_message() or "no command given"
            errors = getattr(error.__cause__, "errors", None)
            if errors is not None:  # pydantic's, whose words leave the value out
                said += f", got {errors()[0]['input']!r}"
            print(f"error: {said}", file=sys.stderr)
            return int(error.exit_code)
        raise


if __name__ == "__main__":
    sys.exit(main())
