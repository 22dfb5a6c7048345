"""What a browser may do for a web page: with CORS, and on a server without keys."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest

from endpoints import browsers
from tests.endpoints.running import RunningServer, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Script

LOOPBACK_PAGE = "http://localhost:8000"
EVIL = "https://evil.example"
UNLOAD = "/v1/model/unload"


@pytest.fixture(scope="module")
def keyless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that serves everybody as administrator, without a model: what is let in gets 503."""
    engine = ScriptedEngine(tmp_path_factory.mktemp("keyless"))
    engine.add_model("alpha")
    engine.write(Script())
    network = {"allowed_hosts": ["llm.example.com"], "cors_origins": ["loopback", "https://chat.example.com"]}
    with running_server(engine, auth=False, network=network).running() as running:
        yield running


def ask(server: RunningServer, method: str = "POST", path: str = UNLOAD, **headers: str | None) -> httpx.Response:
    """With headers whose names have underscores; None leaves one out."""
    given = {name.replace("_", "-"): value for name, value in headers.items() if value is not None}
    return server.anonymous.request(method, path, headers=given)


def refusal(response: httpx.Response) -> str:
    """The code of a 403, which names the setting that would help."""
    assert response.status_code == 403
    error = response.json()["error"]
    assert error["type"] == "permission_error"
    setting = {"host_not_allowed": "network.allowed_hosts", "origin_not_allowed": "network.cors_origins"}
    assert setting[error["code"]] in error["message"]
    code: str = error["code"]
    return code


# --- the name that the server is asked by ---------------------------------------------------------------------------

OWN_HOSTS = [
    *("127.0.0.1", "127.0.0.1:5000", "192.168.1.20:5000", "[::1]", "[::1]:5000", "[FE80::1]:5000", "8.8.8.8"),
    *("localhost", "localhost:5000", "LOCALHOST", "localhost.", "app.localhost:5000", "mybox.local", "MyBox.Local.:80"),
    *("host.docker.internal:5000", "llm.example.com", "LLM.example.com:443", "llm.example.com.", "localhost:"),
]
FOREIGN_HOSTS = [
    *(
        "evil.example",
        "evil.example:5000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example.",
        "local",
    ),
    *("local", "xlocalhost", "evillocal", "llm.example.com.evil.example", "sub.llm.example.com", "2130706433", "::1"),
    *("127.0.0.1@evil.example", "localhost:5000@evil.example", "localhost evil.example", "localhost/evil", "[::1", "]"),
    *(
        "localhost..",
        "localhost:5000:5000",
        "localhost:x",
        "*",
        "[localhost]",
        "localhost, evil.example",
        "[fe80::1%eth0]",
    ),
]


@pytest.mark.parametrize("host", OWN_HOSTS)
@pytest.mark.parametrize("header", ["origin", "sec_fetch_site"])
def test_own_names(keyless: RunningServer, host: str, header: str) -> None:
    value = LOOPBACK_PAGE if header == "origin" else "same-origin"
    assert ask(keyless, Host=host, **{header: value}).status_code == 503


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
@pytest.mark.parametrize("header", ["origin", "sec_fetch_site"])
def test_names_that_a_page_has_made_resolve_here(keyless: RunningServer, host: str, header: str) -> None:
    """DNS rebinding: to the browser it is the page's own server, so CORS is not asked."""
    value = f"http://{host}" if header == "origin" else "same-origin"
    response = ask(keyless, Host=host, **{header: value})
    assert refusal(response) == "host_not_allowed"
    assert host in response.json()["error"]["message"]


def test_the_name_of_the_machine(keyless: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    name = socket.gethostname()
    assert ask(keyless, Host=f"{name}:5000", origin=LOOPBACK_PAGE).status_code == 503
    monkeypatch.setattr(socket, "gethostname", lambda: "MyBox")
    monkeypatch.setattr(socket, "getfqdn", lambda name: "mybox.lan.")
    assert browsers._machine_names() == {"mybox", "mybox.lan"}


@pytest.mark.parametrize("host", FOREIGN_HOSTS[:3])
def test_programs_may_use_any_name(keyless: RunningServer, host: str) -> None:
    assert ask(keyless, Host=host).status_code == 503
    assert ask(keyless, Host=host, sec_fetch_mode="cors", referer=EVIL, User_Agent="node").status_code == 503


def test_with_keys_no_name_is_refused(server: RunningServer) -> None:
    response = server.http.get("/v1/models", headers={"Host": "evil.example", "Origin": EVIL})
    assert response.status_code == 200
    assert "Access-Control-Allow-Origin" not in response.headers


# --- whose page it is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "origin",
    [
        *(LOOPBACK_PAGE, "http://127.0.0.1:3000", "https://[::1]", "https://chat.example.com"),
        *("chrome-extension://abcdefgh", "vscode-webview://x", "app://obsidian.md", "tauri://localhost"),
    ],
)
@pytest.mark.parametrize("site", [None, "cross-site", "same-site"])
def test_pages_that_may_use_the_server(keyless: RunningServer, origin: str, site: str | None) -> None:
    assert ask(keyless, origin=origin, sec_fetch_site=site).status_code == 503


@pytest.mark.parametrize("site", ["same-origin", "none", "same-site"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_its_own_pages_and_the_address_bar(keyless: RunningServer, site: str, method: str) -> None:
    assert ask(keyless, method, sec_fetch_site=site).status_code == 503
    assert ask(keyless, Host="192.168.1.20:5000", origin="http://192.168.1.20:5000").status_code == 503


@pytest.mark.parametrize(
    "origin",
    [
        *(
            EVIL,
            "http://evil.example:5000",
            "null",
            "",
            "http://localhost.evil.example",
            "https://chat.example.com:8443",
        ),
        *("http://chat.example.com", "https://chat.example.com.evil.example", "http://192.168.1.20", "http://[", "//x"),
        *("loopback", "*", "HTTPS://evil.example", "localhost:8000", "http://"),
        *("://", "https:evil.example", "HTTP://127.0.0.2", "http://127.0.0.1:x"),
    ],
)
@pytest.mark.parametrize("site", [None, "cross-site"])
def test_other_pages_cannot_act(keyless: RunningServer, origin: str, site: str | None) -> None:
    """As forms and plain POSTs do, which browsers send without asking CORS first."""
    for method in ("POST", "GET"):
        response = ask(keyless, method, origin=origin, sec_fetch_site=site, Content_Type="text/plain")
        assert refusal(response) == "origin_not_allowed"
        assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize("site", ["cross-site", "", "something new"])
def test_links_and_images_of_other_pages_cannot_act(keyless: RunningServer, site: str) -> None:
    assert refusal(ask(keyless, "GET", sec_fetch_site=site, sec_fetch_mode="navigate")) == "origin_not_allowed"


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/docs", "/nothing", "//v1/models", "/v1/%6dodels"])
def test_no_path_is_left_out(keyless: RunningServer, path: str) -> None:
    assert refusal(ask(keyless, "GET", path, origin=EVIL)) == "origin_not_allowed"


def test_a_star_lets_every_page_in(scripted: ScriptedEngine) -> None:
    with running_server(scripted, auth=False, network={"cors_origins": ["*"]}).running() as server:
        assert ask(server, origin=EVIL).status_code == 503
        assert ask(server, origin="null", sec_fetch_site="cross-site").status_code == 503
        assert refusal(ask(server, origin="http://evil.example", Host="evil.example")) == "host_not_allowed"


def test_with_keys_every_page_may_ask(server: RunningServer) -> None:
    """It has none to send along: browsers add cookies by themselves, but no headers."""
    assert server.anonymous.post(UNLOAD, headers={"Origin": EVIL}).status_code == 401
    assert server.http.get("/v1/models", headers={"Origin": EVIL, "Sec-Fetch-Site": "cross-site"}).status_code == 200


@pytest.mark.parametrize(
    "content_type", [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_a_body_that_browsers_send_unasked_is_not_read(server: RunningServer, content_type: str | None) -> None:
    request = server.admin.build_request(
        "POST",
        "/v1/model/load",
        content=b'{"model_name": "beta"}',
        headers={} if content_type is None else {"Content-Type": content_type},
    )
    response = server.admin.send(request)
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]["message"]


# --- CORS -----------------------------------------------------------------------------------------------------------


def preflight(server: RunningServer, origin: str, **headers: str) -> httpx.Response:
    names = "authorization, content-type, x-api-key, x-admin-key, x-request-id, x-stainless-lang, anthropic-version"
    return ask(
        server,
        "OPTIONS",
        origin=origin,
        Access_Control_Request_Method="POST",
        Access_Control_Request_Headers=names,
        **headers,
    )


def test_preflight_allows_what_clients_send(keyless: RunningServer) -> None:
    response = preflight(keyless, "https://chat.example.com")
    assert response.status_code == 200
    allowed = response.headers["Access-Control-Allow-Headers"]
    assert {"x-api-key", "x-admin-key", "x-request-id", "anthropic-version"} <= set(allowed.split(", "))
    assert "Origin" in response.headers["Vary"]
    assert "Access-Control-Allow-Private-Network" not in response.headers


def test_a_page_of_the_internet_may_be_let_into_a_home_network(keyless: RunningServer) -> None:
    asking = {"Access_Control_Request_Private_Network": "true"}
    allowed = preflight(keyless, "https://chat.example.com", **asking)
    assert (allowed.status_code, allowed.headers["Access-Control-Allow-Private-Network"]) == (200, "true")
    refused = preflight(keyless, EVIL, **asking)
    assert refused.status_code == 400
    assert "Access-Control-Allow-Origin" not in refused.headers


def test_caches_tell_origins_apart(server: RunningServer) -> None:
    for headers in ({}, {"Origin": EVIL}, {"Origin": LOOPBACK_PAGE}):
        assert "Origin" in server.anonymous.get("/health", headers=headers).headers["Vary"]
    answer = server.anonymous.get("/health", headers={"Origin": LOOPBACK_PAGE})
    assert answer.headers["Access-Control-Expose-Headers"] == "X-Request-Id"
