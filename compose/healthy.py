#!/opt/driftline/bin/python -IS
"""`healthy URL`: exit code 0 if it answers 200 within two seconds, 1 otherwise, with the answer on stdout either way."""

import sys
import urllib.error
import urllib.request

try:
    with urllib.request.urlopen(sys.argv[1], timeout=2) as answer:
        print(answer.read().decode(errors="replace"))
except urllib.error.HTTPError as refused:
    sys.exit(f"{refused.code} {refused.read(4096).decode(errors='replace')}")
except OSError as error:
    sys.exit(f"{sys.argv[1]}: {error}")
