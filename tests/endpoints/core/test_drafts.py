from __future__ import annotations

from tests.endpoints.running import RunningServer, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Script


def test_an_administrator_sees_the_folder_and_others_what_drafts(scripted: ScriptedEngine) -> None:
    """The scripted engine drafts with whatever its settings name."""
    (scripted.model_dir / "no model").mkdir()
    scripted.write(Script())

    def names(server: RunningServer) -> tuple[list[str], list[str]]:
        answers = [client.get("/v1/model/draft/list").json() for client in (server.admin, server.http)]
        admin, other = ([card["id"] for card in answer["data"]] for answer in answers)
        return admin, other

    with running_server(scripted, draft_model={"draft_model_dir": str(scripted.model_dir)}).running() as server:
        assert names(server) == (["alpha", "beta"], [])
        server.load("alpha")
        assert names(server) == (["alpha", "beta"], [])
        server.load("alpha", draft_model={"draft_model_name": "beta"})
        assert names(server) == (["alpha", "beta"], ["beta"])
        parameters = server.http.get("/v1/model").json()["parameters"]
        assert (parameters["draft"]["id"], parameters["draft_mode"]) == ("beta", "model")
        assert server.anonymous.get("/v1/model/draft/list").status_code == 401
