"""The page's own files: there, whole, and asking for nothing from elsewhere."""

import re

from penstock.page.page_files import page_files


def test_every_file_that_the_page_names_is_there() -> None:
    files = {path: body.decode() for path, (body, _) in page_files().items()}
    named = set(re.findall(r'(?:href|src)="([^"#]+)"', files["/index.html"]))
    assert {f"/{name}" for name in named} <= set(files)
    for path, text in files.items():
        if path.endswith(".js") and "vendor" not in path:
            folder = path.rpartition("/")[0]
            for name in re.findall(r'from "([^"]+)"', text):
                found = f"{folder}/{name}".replace("/./", "/")
                found = re.sub(r"/[^/]+/\.\./", "/", found)
                assert found in files, (path, name)


def test_nothing_is_loaded_from_elsewhere_and_nothing_is_made_of_text() -> None:
    for path, (body, _) in page_files().items():
        text = body.decode()
        if "vendor" in path:
            continue
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text
        ), path


def test_libraries_come_with_their_licences() -> None:
    body, kind = page_files()["/vendor/uPlot.LICENSE"]
    assert body.startswith(b"The MIT License") and kind == "text/plain"
    assert b"1.6.32" in page_files()["/vendor/uPlot.iife.min.js"][0][:100]
