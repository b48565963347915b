"""The command `nanovllm`, which is also `python -m nanovllm`."""

import signal


def main() -> None:
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the import ends the process silently
    from nanovllm.serve.cli import main as run

    signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    main()
