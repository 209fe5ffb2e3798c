"""Write the generated pages of docs/, or with --check fail when they are not up to date."""

import sys
from pathlib import Path

from api_reference import api_reference

from penstock.cli.config_reference import configuration_reference

PAGES = {
    Path("docs/configuration.md"): configuration_reference,
    Path("docs/api.md"): api_reference,
}


def main() -> int:
    stale = []
    for path, make in PAGES.items():
        text = make()
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(path)
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            print(f"wrote {path}")
    if stale and "--check" in sys.argv:
        print(f"not up to date: {', '.join(map(str, stale))}; run `make docs`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
