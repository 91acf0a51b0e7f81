"""The agent with a real control plane and a real store."""

from tests.agent.world import KV_SWA, Engine, prompt, session_request


def test_what_one_engine_publishes_another_has_at_once_and_from_the_store_after_a_restart(
    file_stack, start_agent
):
    agent = start_agent(file_stack.url)
    pages = prompt("first", 6)
    with agent.client() as client, client.open(session_request(KV_SWA, 16)) as session:
        assert session.opened.namespace_id
        engine = Engine(session, KV_SWA)
        assert session.match(pages).pages == 0
        engine.publish(pages)
        with client.open(session_request(KV_SWA, 16, engine="engine-b")) as other:
            found = other.match(pages)
            assert (found.pages, len(found.slots["kv"]), len(found.slots["swa"])) == (6, 6, 2)
            Engine(other, KV_SWA).check(pages, found.slots, 6)
            other.release(found.token)
    assert agent.stop() == 0
    agent.start()
    with agent.client() as client, client.open(session_request(KV_SWA, 16)) as session:
        assert session.match(pages).pages == 0
        done = session.wait(session.prefetch(pages))
        assert (done.state, done.transfers_done, done.restorable[-1][1]) == ("done", True, 6), done
        Engine(session, KV_SWA).check(pages, done.slots, 6)
        session.release(done.token)
