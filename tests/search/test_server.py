"""The search page's application: good questions answered, bad ones refused with a sentence."""

import asyncio
import contextlib
import io
import socket
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from rankgrad.cli.search_commands import main_serve
from rankgrad.search.search_service import MOST_BYTES, RefusedError, SearchService, check_upload
from rankgrad.search.server import TimedProtocol, make_app


@pytest.fixture(scope="module")
def page(trained, searcher) -> SearchService:
    return SearchService(trained, searcher)


@pytest.fixture(scope="module")
def client(page) -> TestClient:
    return TestClient(make_app(page, hosts=["127.0.0.1", "localhost"]), base_url="http://127.0.0.1:8000")


def send(client: TestClient, content: bytes, name: str = "query.png", **options):
    return client.post("/api/search", files={"image": (name, content)}, **options)


def encoded(kind: str, size: tuple[int, int] = (40, 30)) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, kind)
    return content.getvalue()


def png_head(width: int, height: int) -> bytes:
    """A PNG that says it is so large and is a few bytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(64))) + chunk(b"IEND", b"")


def test_an_uploaded_image_of_the_gallery_finds_itself(client, data, gallery):
    content = (data / "test" / "class-006" / "3.png").read_bytes()
    answer = send(client, content)
    assert answer.status_code == 200
    found = answer.json()
    assert found["query"] is None
    assert len(found["results"]) == 24
    first = found["results"][0]
    assert (first["rank"], first["name"], first["label"]) == (1, "class-006/3.png", "class-006")
    assert first["score"] == pytest.approx(1, abs=1e-4)
    assert first["right"] is None
    assert [one["rank"] for one in found["results"]] == list(range(1, 25))
    scores = [one["score"] for one in found["results"]]
    assert scores == sorted(scores, reverse=True)


def test_a_search_from_the_gallery_says_what_is_right(client, gallery):
    found = client.get("/api/search", params={"item": 7, "k": 29}).json()
    assert found["query"] == {"id": 7, "label": "class-006", "category": "", "name": "class-006/1.png", "class_size": 6}
    assert 7 not in [one["id"] for one in found["results"]]
    assert len(found["results"]) == 29
    for one in found["results"]:
        assert one["right"] == (gallery.images.labels[one["id"]] == "class-006")
        assert one["score"] == pytest.approx(float(gallery.embeddings[7] @ gallery.embeddings[one["id"]]), abs=1e-4)


def test_results_are_filtered_by_label(client, gallery, data):
    content = (data / "test" / "class-006" / "3.png").read_bytes()
    for found in (
        client.get("/api/search", params={"item": 7, "label": "CLASS-008"}).json(),
        send(client, content, params={"label": "class-008"}).json(),
    ):
        assert [one["label"] for one in found["results"]] == ["class-008"] * 6
        scores = [one["score"] for one in found["results"]]
        assert scores == sorted(scores, reverse=True)
    assert len(client.get("/api/search", params={"item": 7, "label": "class-006"}).json()["results"]) == 5
    assert client.get("/api/search", params={"item": 7, "label": "nobody"}).json()["results"] == []


def test_a_part_of_an_image_is_searched_with(client, data, trained, tmp_path):
    path = data / "test" / "class-006" / "3.png"
    image = Image.open(path).convert("RGB")
    width, height = image.size
    part = image.crop((round(0.25 * width), 0, width, round(0.5 * height)))
    wanted = trained.embed(part)
    from_file = client.get("/api/search", params={"item": 9, "box": "0.25,0,1,0.5"}).json()
    from_upload = send(client, path.read_bytes(), params={"box": "0.25,0,1,0.5"}).json()
    assert from_file["query"]["name"] == "class-006/3.png"
    for found in (from_file, from_upload):
        for one in found["results"]:
            assert one["score"] == pytest.approx(float(wanted @ trained.embed(data / "test" / one["name"])), abs=1e-3)
    whole = client.get("/api/search", params={"item": 9, "box": "0,0,1,1"}).json()
    assert whole["results"][0]["score"] == pytest.approx(1, abs=1e-4)
    # as a viewer shows it
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = io.BytesIO()
    image.transpose(Image.Transpose.ROTATE_90).save(turned, "PNG", exif=exif)
    assert send(client, turned.getvalue(), params={"box": "0.25,0,1,0.5"}).json()["results"] == from_upload["results"]


def test_a_link_finds_what_the_upload_found(client, data):
    content = (data / "test" / "class-006" / "3.png").read_bytes()
    found = send(client, content).json()
    again = client.get("/api/search", params={"link": found["link"]}).json()
    # a link holds a byte for each dimension: rounding moves a cosine by at most a 440th (standard deviation), and neighbours
    # whose scores are closer than that may change places
    scores = {one["id"]: one["score"] for one in found["results"]}
    assert again["results"][0]["id"] == found["results"][0]["id"]
    for one in again["results"][:5]:
        assert one["score"] == pytest.approx(scores[one["id"]], abs=1 / 440)
    for one, other in zip(found["results"], again["results"], strict=True):
        assert one["score"] == pytest.approx(other["score"], abs=1 / 440)
    assert len(found["link"]) == 22


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_every_kind_is_told_by_its_content(client, kind):
    assert send(client, encoded(kind), name="../../etc/passwd").status_code == 200


def test_a_camera_s_orientation_is_applied(client, data, trained, tmp_path):
    image = Image.open(data / "test" / "class-006" / "3.png").convert("RGB")
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(turned, "PNG", exif=exif)
    first = send(client, turned.getvalue()).json()["results"][0]
    assert first["name"] == "class-006/3.png"
    assert first["score"] == pytest.approx(1, abs=1e-4)


WHOLE = encoded("JPEG", (400, 300))


@pytest.mark.parametrize(
    ("content", "status", "sentence"),
    [
        (b"", 400, "The file is empty."),
        (b"hello, this is text", 415, "Unsupported image. Use JPEG, PNG, WebP, GIF or BMP."),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415, "Unsupported image."),
        (encoded("TIFF"), 415, "Unsupported image."),
        (b"\xff\xd8\xff\xe0 and no more", 422, "The JPEG file is damaged and cannot be read."),
        (WHOLE[: len(WHOLE) // 2], 422, "The image cannot be read: it is truncated or damaged."),
        (png_head(20_000, 20_000), 413, "The image has too many pixels: the limit is 40 million."),
        (png_head(8_000, 8_000), 413, "This one has 8,000 x 8,000."),
        (png_head(300, 300), 422, "The image cannot be read"),
        (encoded("PNG", (900, 10)), 422, "aspect ratio is too large"),
    ],
)
def test_bad_uploads_are_answered_with_a_sentence(client, content, status, sentence):
    answer = send(client, content, name="photo.jpg")
    assert answer.status_code == status
    assert sentence in answer.json()["error"]
    assert "/tmp" not in answer.text
    assert "Traceback" not in answer.text


def test_nothing_is_decoded_of_a_bomb(monkeypatch):
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("pixels were decoded"))
    with pytest.raises(RefusedError, match="too many pixels"):
        check_upload(png_head(20_000, 20_000))


def test_too_large_is_refused_before_and_while_reading(client):
    assert send(client, b"\xff\xd8\xff" + bytes(MOST_BYTES + 20_000)).status_code == 413
    sent = 0

    def endless():
        nonlocal sent
        yield b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n\xff\xd8\xff'
        while sent < 5 * MOST_BYTES:
            sent += 2**20
            yield bytes(2**20)

    headers = {"content-type": "multipart/form-data; boundary=x"}
    answer = client.post("/api/search", content=endless(), headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"] == "The file is larger than 10 MB. Choose a smaller one."


def test_a_file_just_above_the_limit_is_refused(client):
    assert send(client, b"\xff\xd8\xff" + bytes(MOST_BYTES - 2)).status_code == 413


@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        ({"content": b"\xff\xd8\xff", "headers": {"content-type": "image/jpeg"}}, 415, 'Send the image as the field "image"'),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, "The form cannot be read"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=y"}}, 400, "The form cannot be read"),
        ({"files": {"other": ("a.png", encoded("PNG"))}}, 400, 'The form has no file in the field "image".'),
        ({"files": {"image": ("a.png", encoded("PNG"))}, "data": {"more": "1"}}, 400, "one image and nothing else"),
    ],
)
def test_bad_forms_are_answered_with_a_sentence(client, options, status, sentence):
    answer = client.post("/api/search", **options)
    assert answer.status_code == status
    assert sentence in answer.json()["error"]


@pytest.mark.parametrize(
    ("address", "status", "sentence"),
    [
        ("/api/search", 400, "Say what to search from"),
        ("/api/search?item=30", 404, "There is no image 30: the gallery has 0 to 29."),
        ("/api/search?item=-1", 400, "item must be a whole number"),
        ("/api/search?item=../../etc/passwd", 400, "item must be a whole number"),
        ("/api/search?item=1&k=0", 400, "k must be a whole number from 1 to 100."),
        ("/api/search?item=1&k=101", 400, "k must be a whole number from 1 to 100."),
        ("/api/search?item=²", 400, "item must be a whole number"),
        ("/api/search?item=1&box=0,0,1", 400, "box must be four numbers from 0 to 1"),
        ("/api/search?item=1&box=0.5,0,0.5,1", 400, "box must have its left edge before its right"),
        ("/api/search?item=1&box=0,0,1e9,1", 400, "box must be four numbers"),
        ("/api/search?item=30&box=0,0,1,1", 404, "There is no image 30"),
        ("/api/search?link=abc", 400, "The link is damaged or belongs to another model."),
        ("/api/search?link=%00%ff", 400, "The link is damaged"),
        (f"/api/search?link={'A' * 22}", 400, "The link is damaged"),
        ("/api/items?offset=x", 400, "offset must be a whole number"),
        ("/api/items?limit=1000000", 400, "limit must be a whole number from 1 to 96."),
        ("/thumb/30", 404, "There is no image 30"),
        ("/thumb/99999999999999999999999", 404, "There is no image"),
        (f"/thumb/{'9' * 5000}", 404, "There is no image"),
        ("/thumb/-1", 404, "Not Found."),
        ("/thumb/1.png", 404, "Not Found."),
        ("/thumb/..%2f..%2fetc%2fpasswd", 404, "Not Found."),
        ("/%2e%2e/%2e%2e/etc/passwd", 404, "Not Found."),
        ("/page/index.html", 404, "Not Found."),
        ("/../server.py", 404, "Not Found."),
        ("/embedding.json", 404, "Not Found."),
    ],
)
def test_bad_addresses_are_answered_with_a_sentence(client, address, status, sentence):
    answer = client.get(address)
    assert answer.status_code == status
    assert sentence in answer.json()["error"]


def test_no_file_is_opened_by_what_a_request_says(client, monkeypatch):
    opened: list[str] = []
    open_image = Image.open
    monkeypatch.setattr(Image, "open", lambda file, *rest, **more: opened.append(str(file)) or open_image(file, *rest, **more))
    send(client, encoded("PNG"), name="/etc/passwd")
    client.get("/thumb/3?v=/etc/passwd")
    assert len(opened) == 3
    assert not any("passwd" in name for name in opened)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "192.168.0.7:8000", ""])
def test_other_host_names_are_refused(client, host):
    assert client.get("/api/about", headers={"host": host}).status_code == 400


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "LOCALHOST"])
def test_its_own_names_are_answered(client, host):
    assert client.get("/api/about", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("site", "path", "status"),
    [
        ("cross-site", "/api/about", 403),
        ("same-site", "/thumb/1", 403),
        ("cross-site", "/", 200),
        ("same-origin", "/thumb/1", 200),
    ],
)
def test_other_sites_scripts_are_refused(client, site, path, status):
    assert client.get(path, headers={"sec-fetch-site": site}).status_code == status


@pytest.mark.parametrize(
    ("origin", "path", "status"),
    [
        ("http://evil", "/api/about", 403),
        ("http://127.0.0.1:8000.evil", "/thumb/1", 403),
        ("http://127.0.0.1:9000", "/api/about", 403),
        ("null", "/api/about", 403),
        ("http://[", "/api/about", 403),
        ("http://127.0.0.1:8000", "/api/about", 200),
        ("http://evil", "/", 200),
    ],
)
def test_another_origin_is_refused_also_where_the_browser_says_nothing_of_sites(client, origin, path, status):
    assert client.get(path, headers={"origin": origin}).status_code == status
    if path == "/api/about":
        assert send(client, encoded("PNG"), headers={"origin": origin}).status_code == status


@pytest.mark.parametrize(
    "path", ["/", "/page.js", "/page.css", "/icon.svg", "/api/about", "/thumb/0", "/nothing", f"/thumb/{'9' * 5000}"]
)
def test_every_answer_has_the_headers_that_keep_it_in(client, path):
    headers = client.get(path).headers
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers


def test_the_page_asks_nobody_else(client):
    texts = [client.get(path).text for path in ("/", "/page.js", "/page.css")]
    assert not any("//" in text.replace("http://www.w3.org/2000/svg", "").replace("// ", "") for text in texts)


def test_a_thumbnail_says_nothing_of_its_file(trained, searcher, data, tmp_path):
    from rankgrad.search import Searcher, embed_images, folder_of_images

    exif = Image.Exif()
    exif[0x010F] = "SecretCamera"
    image = Image.open(data / "test" / "class-006" / "3.png").convert("RGB")
    (tmp_path / "in").mkdir()
    image.save(tmp_path / "in" / "a.jpg", exif=exif, comment=b"SecretComment")
    gallery = embed_images(trained, folder_of_images(tmp_path / "in"), tmp_path / "out", shown=False)
    page = SearchService(trained, Searcher(gallery))
    content = page.thumb(0)
    assert b"Secret" not in content
    shown = Image.open(io.BytesIO(content))
    assert shown.format == "JPEG"
    assert min(shown.size) == 256
    (tmp_path / "in" / "a.jpg").unlink()
    with pytest.raises(RefusedError, match="The file of image 0 is missing or cannot be read"):
        page.thumb(0)


def test_items_are_paged_through_without_repeats(client):
    pages = [client.get("/api/items", params={"seed": 5, "offset": offset, "limit": 12}).json() for offset in (0, 12, 24)]
    found = [one["id"] for page in pages for one in page["items"]]
    assert sorted(found) == list(range(30))
    assert {page["total"] for page in pages} == {30}
    other = client.get("/api/items", params={"seed": 6, "limit": 30}).json()
    assert [one["id"] for one in other["items"]] != found


def test_items_are_found_by_label(client, gallery):
    answer = client.get("/api/items", params={"label": "CLASS-006"}).json()
    assert answer["total"] == 6
    assert {one["label"] for one in answer["items"]} == {"class-006"}
    assert client.get("/api/items", params={"label": "unheard of"}).json() == {"total": 0, "offset": 0, "items": []}


def test_the_page_is_served_while_the_network_works(page, monkeypatch):
    begun, finish = threading.Event(), threading.Event()

    def slow(content, box):
        begun.set()
        assert finish.wait(20)
        raise RefusedError(422, "done")

    monkeypatch.setattr(page, "embed_upload", slow)
    with TestClient(make_app(page, hosts=["*"])) as client:
        answers = []
        work = threading.Thread(target=lambda: answers.append(send(client, encoded("PNG"))))
        work.start()
        assert begun.wait(20)
        began = time.monotonic()
        assert client.get("/api/about").status_code == 200
        assert client.get("/thumb/0").status_code == 200
        assert time.monotonic() - began < 10
        assert not answers
        finish.set()
        work.join(20)
    assert answers[0].json() == {"error": "done"}


def test_a_failure_inside_is_no_traceback_outside(page, monkeypatch):
    monkeypatch.setattr(page, "about", lambda: {}["secret"])
    client = TestClient(make_app(page, hosts=["*"]), raise_server_exceptions=False)
    answer = client.get("/api/about")
    assert answer.status_code == 500
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert answer.json() == {"error": "The search failed; the terminal says why."}


def test_uploads_leave_no_file_behind(client, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert send(client, encoded("PNG")).status_code == 200
    assert send(client, WHOLE[: len(WHOLE) // 2]).status_code == 422
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 lets other machines in, and the page has no password: add --allow-remote"),
        (["--host", "example.org"], "add --allow-remote"),
        (["--port", "70000"], "--port must be 0 to 65535, got 70000"),
    ],
)
def test_serve_refuses(run_folder, searcher, arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main_serve([str(run_folder), "--index", str(searcher.gallery.folder), *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_said_to_be(run_folder, searcher):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(OSError, match=f"port {port} cannot be listened on .*choose another with --port"):
            main_serve([str(run_folder), "--index", str(searcher.gallery.folder), "--port", port, "--device", "cpu"])


def test_uploads_are_embedded_one_at_a_time_and_do_not_hold_up_thumbnails(page, monkeypatch):
    """45 uploads, more than there are threads in starlette's pool."""
    at_work, most, lock, go_on = 0, 0, threading.Lock(), threading.Event()

    def slow(content, box):
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        assert go_on.wait(30)
        with lock:
            at_work -= 1
        raise RefusedError(422, "done")

    monkeypatch.setattr(page, "embed_upload", slow)
    with TestClient(make_app(page, hosts=["*"])) as client, ThreadPoolExecutor(45) as pool:
        answers = [pool.submit(send, client, encoded("PNG")) for _ in range(45)]
        time.sleep(1)
        began = time.monotonic()
        assert all(client.get(f"/thumb/{row}").status_code == 200 for row in range(5))
        assert client.get("/api/items").status_code == 200
        assert time.monotonic() - began < 5
        go_on.set()
        assert {answer.result().status_code for answer in answers} == {422}
    assert most == 1


def test_more_uploads_than_can_wait_are_refused(page, monkeypatch):
    monkeypatch.setattr("rankgrad.search.server.MOST_WAITING", 2)
    go_on = threading.Event()
    monkeypatch.setattr(page, "embed_upload", lambda content, box: go_on.wait(30) and np.eye(16, dtype=np.float32)[0])
    with TestClient(make_app(page, hosts=["*"])) as client, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(send, client, encoded("PNG")) for _ in range(8)]
        while sum(answer.done() for answer in answers) < 5:
            time.sleep(0.01)
        go_on.set()
        statuses = sorted(answer.result().status_code for answer in answers)
    assert statuses == [200] * 3 + [503] * 5


def test_an_upload_that_does_not_end_is_given_up(client, monkeypatch):
    monkeypatch.setattr("rankgrad.search.server.UPLOAD_SECONDS", 0.3)

    async def endless(self):
        yield b"--x\r\n"
        await asyncio.sleep(20)

    monkeypatch.setattr("starlette.requests.Request.stream", endless)
    answer = client.post("/api/search", content=b"x", headers={"content-type": "multipart/form-data; boundary=x"})
    assert answer.status_code == 408


@pytest.fixture
def served(page, monkeypatch):
    """The page behind uvicorn with short time limits; the port."""
    import uvicorn

    monkeypatch.setattr("rankgrad.search.server.HEAD_SECONDS", 0.5)
    monkeypatch.setattr("rankgrad.search.server.READ_SECONDS", 0.5)
    config = uvicorn.Config(
        make_app(page, hosts=["*"]), http=TimedProtocol, ws="none", log_level="critical", timeout_keep_alive=1
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join(20)


def is_closed(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


GET = b"GET /api/about HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize("start", [b"", b"GET / HT", GET, GET + b"\r\n" + GET])
def test_slow_connections_are_closed(served, start):
    """One that sends nothing, half a line, half a head, and half a head after a whole request."""
    with socket.create_connection(("127.0.0.1", served)) as connection:
        connection.sendall(start)
        assert is_closed(connection, 10)


def test_many_slow_connections_do_not_hold_up_the_page(served):
    slow = [socket.create_connection(("127.0.0.1", served)) for _ in range(300)]
    for connection in slow:
        connection.sendall(GET)
    with socket.create_connection(("127.0.0.1", served)) as connection:
        connection.sendall(GET + b"Connection: close\r\n\r\n")
        connection.settimeout(10)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert all(is_closed(connection, 10) for connection in slow)
    for connection in slow:
        connection.close()


def test_a_client_that_does_not_read_is_given_up(served):
    with socket.create_connection(("127.0.0.1", served)) as connection:
        connection.settimeout(1)
        deadline = time.monotonic() + 20
        # the answers are never read
        with pytest.raises(ConnectionError):  # noqa: PT012
            while time.monotonic() < deadline:
                with contextlib.suppress(TimeoutError):
                    connection.sendall(b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
