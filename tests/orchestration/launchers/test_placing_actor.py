from penstock.orchestration.launchers.placing_actor import PlacingActor

AGENT = """
import os, sys
token = sys.stdin.read()
print(token == "the-" + "token", token in str(os.environ), file=sys.stderr)
sys.exit(3)
"""


def test_an_agent_gets_the_token_from_its_input_and_its_end_is_told() -> None:
    end = PlacingActor().run(["-c", AGENT], "the-token")
    assert (end.code, end.last_lines.split()) == (3, ["True", "False"])
