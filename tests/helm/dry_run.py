"""Let an API server judge the chart, without changing anything: `python -m tests.helm.dry_run`.

It is the one that kubectl would ask: KUBECONFIG, or ~/.kube/config, and its current context.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys

from tests.helm.chart import OTHERS, VALUES, render, values_of

ASK_S = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--namespace", default="default", help="it has to be there")
    namespace: str = parser.parse_args().namespace
    if shutil.which("kubectl") is None:
        print("helm-dry-run: there is no kubectl here: install it", file=sys.stderr)
        return 2
    asked = _kubectl("config", "current-context")
    if asked.returncode:
        print(
            "helm-dry-run: kubectl has no cluster to ask: set KUBECONFIG to a kubeconfig with a "
            f"current context ({asked.stderr.strip()})",
            file=sys.stderr,
        )
        return 2
    print(f"asking {asked.stdout.strip()}, namespace {namespace}")
    wrong = 0
    for path in VALUES:
        objects = render(values_of(path)).objects
        for each in objects:
            each["metadata"]["namespace"] = namespace
        known = [each for each in objects if each["kind"] not in OTHERS]
        sent = json.dumps({"apiVersion": "v1", "kind": "List", "items": known})
        done = _kubectl("apply", "--dry-run=server", "--filename=-", given=sent)
        wrong += done.returncode != 0
        print(f"{path.name}: {'refused' if done.returncode else f'{len(known)} objects taken'}")
        print(done.stderr, end="", file=sys.stderr)
    return 1 if wrong else 0


def _kubectl(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = ["kubectl", f"--request-timeout={ASK_S}s", *words]
    return subprocess.run(
        command, input=given, capture_output=True, text=True, check=False, timeout=2 * ASK_S
    )


if __name__ == "__main__":
    sys.exit(main())
