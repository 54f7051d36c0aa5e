"""Private authority for `outrider up --tls`, and the certificate of its services, made by the openssl command."""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
from pathlib import Path

from outrider.base.endpoint import ANY_HOST, address
from outrider.protocol.errors import StartupError

_DAYS = "3650"
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_AUTHORITY = ("-days", _DAYS, "-subj", "/CN=outrider up", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
_KEY_IDS = "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid,issuer\n"  # Python 3.13 wants these, and keyUsage
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}")


def make_certificate(folder: Path, host: str) -> tuple[Path, Path, Path]:
    """Return the files of certificate, key and authority, for this machine and the address `host`.

    The authority is made once, so that clients keep trusting it, and the certificate each time, because names change.
    """
    ca, ca_key, cert, key = (folder / name for name in ("ca.pem", "ca.key", "cert.pem", "cert.key"))
    folder.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        scratch = Path(name)
        if not (ca.exists() and ca_key.exists()):
            made, made_key = scratch / ca.name, scratch / ca_key.name
            _openssl("req", "-x509", *_NEW_KEY, *_AUTHORITY, "-keyout", made_key, "-out", made)
            made_key.rename(ca_key)
            made.rename(ca)
        wanted, extensions, serial = (scratch / name for name in ("wanted", "extensions", "serial"))
        hosts = dict.fromkeys(["localhost", socket.gethostname(), socket.getfqdn(), "127.0.0.1", "::1", host])
        named = [one for one in hosts if one not in ANY_HOST and _HOST.fullmatch(one.replace(":", "."))]
        names = ",".join(f"{'IP' if address(one) else 'DNS'}:{one}" for one in named)
        extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n{_KEY_IDS}")
        _openssl("req", *_NEW_KEY, "-subj", "/CN=outrider", "-keyout", key, "-out", wanted)
        signing = ("-CA", ca, "-CAkey", ca_key, "-CAserial", serial, "-CAcreateserial", "-days", _DAYS)
        _openssl("x509", "-req", "-in", wanted, *signing, "-extfile", extensions, "-out", cert)
    return cert, key, ca


def _openssl(*arguments: str | Path) -> None:
    try:
        done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise StartupError("--tls needs the openssl command; or give --tls-cert, --tls-key and --tls-ca") from error
    if done.returncode != 0:
        raise StartupError(f"--tls: openssl {arguments[0]} failed: {done.stderr.strip()[-400:]}")
