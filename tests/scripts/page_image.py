"""Makes the picture of the page in the README: `python tests/scripts/page_image.py`, in about 20 seconds.

It starts a server with the bundled model, asks in the chat, runs the demo load, and stops at a step that shows shared
blocks, cached ones and preemptions.
"""

import subprocess
import sys
from pathlib import Path

from browser import open_browser

IMAGE = Path(__file__).parents[2] / ".github" / "page.png"
COMMAND = [sys.executable, "-m", "nanovllm", "serve", "tiny-qwen3", "--port=0"]


def main() -> None:
    server = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        with open_browser() as page:
            page.set_window(1440, 900, prefers_color_scheme="light")
            page.open(line[line.index("http") :].split()[0])
            page.wait_for("player.view !== null")
            for message, num_answers in (("What is 348 + 577?", 1), ("List all prime numbers within 100.", 2)):
                page.run(f"byId('answers').value = {num_answers}; send({message!r})")
            page.run("byId('demo').click()")
            page.wait_for("player.view.counts[3] > 0 && player.view.cached.size > 20", seconds=120)
            page.run("byId('play').click(); isAtEnd = true; draw(); scrollLog()")
            page.wait_for("demo === null", seconds=120)
            page.screenshot(IMAGE)
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main()
