"""What `in_turn` of ladder_command.py starts: carries out `ladder` commands, one after another.

Nothing of the harness is imported at the top: every cell's process runs this file again, as it
runs `python -m harness`.
"""

import functools
import os
import sys
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import Connection


def main():
    """Wait for commands on the connection that the first argument numbers, until it is closed.

    The other arguments: modules for the fork server, besides its own.
    """
    from harness.isolation import fork_server

    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    keep_the_server_in_step()
    fork_server.PRELOADED = (*fork_server.PRELOADED, *sys.argv[2:])
    describe_ours_once()
    make_the_parser_once()
    sample = sampling()
    environment = dict(os.environ)
    connection.send("ready")
    while True:
        try:
            arguments, folder, out, err, briefly = connection.recv()
        except EOFError:
            return
        os.chdir(folder)
        sample(briefly)
        write_to(out, err)
        code = carry_out(arguments)
        write_to(os.devnull, os.devnull)  # flushed: all that was said is in the files
        os.environ.clear()
        os.environ.update(environment)
        connection.send(code)


def carry_out(arguments):
    """The exit code of `ladder ARGUMENTS`; an exception that comes out is shown, as Python does."""
    try:
        from ladder.app import main as ladder

        sys.argv[1:] = arguments
        ladder(arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def write_to(out, err):
    """From now on stdout and stderr, children's too, are these files."""
    for stream, path in ((sys.stdout, out), (sys.stderr, err)):
        stream.flush()
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(handle, stream.fileno())
        os.close(handle)


def keep_the_server_in_step():
    """Have the fork server, and so all cells, the environment that the command has.

    It keeps the one that it was started in: where a command changes it (--device cpu hides the
    GPUs) and the one before did not, it is started anew.
    """
    server = forkserver._forkserver
    ensure_running = server.ensure_running
    started_in = {}

    def ensure():
        if started_in and started_in != dict(os.environ):
            server._stop()
        started_in.clear()
        started_in.update(os.environ)
        ensure_running()

    server.ensure_running = ensure


def describe_ours_once():
    """Load our own stages and the peers for the first command that asks, not for each."""
    from harness.isolation import roster

    describe, known = roster.describe_files, {}

    def described(paths, *limits):
        if not all({*path.parents} & {*roster.OURS} for path in paths):
            return describe(paths, *limits)
        seen = (*paths, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if seen not in known:
            known[seen] = describe(paths, *limits)
        return [*known[seen]]

    roster.describe_files = described


def make_the_parser_once():
    """Make the parser of the command line for the first command, not for each."""
    import typer

    typer.main.get_command = functools.cache(typer.main.get_command)


def sampling():
    """A function that sets whether stages are timed briefly, or for as long as a user's are."""
    from harness.runs import comparison

    usual = comparison.ALONE_SECONDS, comparison.TURN_SECONDS

    def sample(briefly):
        times = (0.02, 0.02) if briefly else usual
        comparison.ALONE_SECONDS, comparison.TURN_SECONDS = times

    return sample


if __name__ == "__main__":
    main()
