"""Records the animation of the page in the README: `python tests/scripts/page_image.py`, in about half a minute.

It starts a server with the bundled model, opens its page, runs the demo load, and asks in the chat meanwhile.
`--frames FOLDER` also keeps the frames, to look at them one by one.
"""

import argparse
import subprocess
import sys
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from time import monotonic

from browser import Page, open_browser
from PIL import Image

IMAGE = Path(__file__).parents[2] / ".github" / "page.webp"
COMMAND = [sys.executable, "-m", "nanovllm", "serve", "tiny-qwen3", "--port=0"]
MESSAGE = "List all prime numbers within 100."
SECONDS = 11  # of the animation at most, before its last frame: a busy machine's steps are shown faster than they were
FRAME_MS, LAST_MS = 150, 2500  # how long a frame is seen at least, and the last one

Frame = tuple[float, bytes]  # when, in seconds, and the window as PNG


def record(page: Page) -> list[Frame]:
    """The demo load from just before it until all answers are complete."""
    frames = [(monotonic(), page.screenshot())]
    page.run(f"byId('demo').click(); setTimeout(() => {{ byId('answers').value = 2; send({MESSAGE!r}) }}, 1500)")
    while page.run("demo !== null || pending !== null"):
        frames.append((monotonic(), page.screenshot()))
    return [*frames, (monotonic(), page.screenshot())]


def write_animation(frames: list[Frame], path: Path) -> None:
    begin, end = frames[0][0], frames[-1][0]
    scale = 1000 * min(1, SECONDS / (end - begin))
    shown = [(0.0, frames[0][1])]  # the time in milliseconds of the animation
    for time, png in frames[1:]:
        if (ms := (time - begin) * scale) >= shown[-1][0] + FRAME_MS:
            shown.append((ms, png))
    shown.append(((end - begin) * scale + FRAME_MS, frames[-1][1]))
    durations = [round(after - ms) for (ms, _), (after, _) in pairwise(shown)] + [LAST_MS]
    first, *others = (Image.open(BytesIO(png)).convert("RGB") for _, png in shown)
    first.save(path, save_all=True, append_images=others, duration=durations, loop=0, quality=60, method=4)
    megabytes = path.stat().st_size / 1e6
    print(f"{path.name}: {end - begin:.1f} s as {sum(durations) / 1000:.1f} s, {len(shown)} frames, {megabytes:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=Path, metavar="FOLDER", help="where to keep the frames, as PNG")
    folder = parser.parse_args().frames
    server = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        with open_browser() as page:
            page.set_window(1440, 900, 0.75, prefers_color_scheme="light")
            page.open(line[line.index("http") :].split()[0])
            page.wait_for("player.view !== null")
            frames = record(page)
    finally:
        server.terminate()
        server.wait(60)
    write_animation(frames, IMAGE)
    for i, (_, png) in enumerate(frames if folder else []):
        (folder / f"{i:03}.png").write_bytes(png)


if __name__ == "__main__":
    main()
