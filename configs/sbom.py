#!/usr/bin/env python3
"""sbom.py - what the executable is made of, for packages: moetrain.spdx.json (SPDX 2.3) and copyright (the licences).

    python3 sbom.py --map MAP --version VERSION --epoch SECONDS --out DIR [--cuda VERSION]

MAP is the linker's map, which names each archive that the executable has code of. The distribution's packages give
versions and licence texts, so this runs on Debian and Ubuntu. An archive without a row in LICENSES is an error."""
import argparse
import json
import os
import re
import subprocess
import sys
import time
import uuid

GCC = "GPL-3.0-or-later WITH GCC-exception-3.1"
NVIDIA = "LicenseRef-NVIDIA-CUDA-EULA"
NVIDIA_TEXT = ("NVIDIA CUDA Toolkit End User License Agreement, which comes with the CUDA Toolkit. Its attachment A "
               "allows to distribute the static CUDA runtime as part of an application.")
LICENSES = {  # of the archives that may be linked
    "libz": "Zlib", "libzstd": "BSD-3-Clause OR GPL-2.0-only", "libbrotlidec": "MIT", "libbrotlicommon": "MIT",
    "libjansson": "MIT", "libinih": "BSD-3-Clause", "libpcre2-8": "BSD-3-Clause",
    "libutf8proc": "MIT AND Unicode-DFS-2015", "libopenblas": "BSD-3-Clause",
    "libgomp": GCC, "libgcc": GCC, "libgcc_eh": GCC, "libstdc++": GCC,
    "libc_nonshared": "LGPL-2.1-or-later", "libcudart_static": NVIDIA, "libcudadevrt": NVIDIA}
CONTENTS = [  # beside the executable
    ("tiny-gptoss", "the model of the demo", "CC0-1.0"),
    ("gsm8k", "the data of the demo: GSM8K as chat messages", "MIT")]
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def linked_archives(path):
    """Paths of the archives that the linker took members from, except archives of this build."""
    with open(path, errors="replace") as f:
        found = {m.group(1) for m in re.finditer(r"^(/\S+\.a)\(\S+\)", f.read(), re.M)}
    if not found:
        sys.exit(f"sbom.py: {path}: names no archive; is it the map of a static link by GNU ld?")
    return sorted({os.path.normpath(p) for p in found})


def query(*command):
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, LC_ALL="C"))
    return done.stdout.strip() if done.returncode == 0 else ""


def owner(path):
    """The installed package that has this file; on systems with a merged /usr, dpkg may list the file without /usr."""
    for name in (path, path.removeprefix("/usr")):
        line = query("dpkg-query", "-S", name)
        if line:
            return line.split(": ")[0].split(",")[0]
    return ""


def package_of(path, cuda):
    """A linked archive: library, Debian package, version, licence, text of the licence."""
    library = os.path.basename(path).removesuffix(".a")
    if library not in LICENSES:
        sys.exit(f"sbom.py: {path}: no licence is known: add a row to LICENSES")
    row = {"library": library, "license": LICENSES[library], "package": owner(os.path.realpath(path))}
    if row["license"] == NVIDIA:
        return row | {"version": cuda, "text": NVIDIA_TEXT}
    if not row["package"]:
        sys.exit(f"sbom.py: {path}: belongs to no package of this system; packages can be made on Debian and Ubuntu")
    row["version"] = query("dpkg-query", "-W", "-f", "${Version}", row["package"])
    with open(f"/usr/share/doc/{row['package'].split(':')[0]}/copyright", errors="replace") as f:
        return row | {"text": f.read()}


def distribution():
    with open("/etc/os-release") as f:
        return next((line[3:].strip().strip('"') for line in f if line.startswith("ID=")), "linux")


def spdx(version, epoch, linked):
    """The document: moetrain contains the linked libraries and the demo's files, and needs the C library."""
    def package(name, licence, number="NOASSERTION", **more):
        return {"SPDXID": "SPDXRef-" + re.sub(r"[^A-Za-z0-9.]", "-", name), "name": name, "versionInfo": number,
                "downloadLocation": "NOASSERTION", "filesAnalyzed": False, "licenseConcluded": licence,
                "licenseDeclared": licence, "copyrightText": "NOASSERTION"} | more

    packages = [package("moetrain", "Apache-2.0", version, primaryPackagePurpose="APPLICATION")]
    relations = [("SPDXRef-DOCUMENT", "DESCRIBES", packages[0]["SPDXID"])]

    def add(relation, *args, **more):
        packages.append(package(*args, **more))
        relations.append((packages[0]["SPDXID"], relation, packages[-1]["SPDXID"]))

    for row in linked:
        purl = f"pkg:deb/{distribution()}/{row['package'].split(':')[0]}@{row['version']}"
        refs = [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": purl}]
        more = {"externalRefs": refs} if row["package"] else {}
        add("STATIC_LINK", row["library"], row["license"], row["version"], **more)
    add("DYNAMIC_LINK", "glibc", "LGPL-2.1-or-later", "2.35 or newer")
    for name, licence in (("libcurl", "curl"), ("libmicrohttpd", "LGPL-2.1-or-later")):
        add("OPTIONAL_DEPENDENCY_OF", name, licence)
        relations[-1] = relations[-1][::-1]
    for name, comment, licence in CONTENTS:
        add("CONTAINS", name, licence, comment=comment)
    document = {
        "spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"moetrain-{version}",
        "creationInfo": {"created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch)),
                         "creators": ["Tool: moetrain-sbom.py"]},
        "packages": packages,
        "relationships": [{"spdxElementId": a, "relationshipType": kind, "relatedSpdxElement": b}
                          for a, kind, b in relations]}
    if any(row["license"] == NVIDIA for row in linked):
        document["hasExtractedLicensingInfos"] = [
            {"licenseId": NVIDIA, "name": "NVIDIA CUDA Toolkit EULA", "extractedText": NVIDIA_TEXT}]
    content = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(document, sort_keys=True))
    return document | {"documentNamespace": f"urn:uuid:{content}"}


def licences(linked):
    """One text: moetrain's licence, then that of each linked library; libraries with the same text share it."""
    with open(os.path.join(ROOT, "LICENSE")) as f:
        parts = [("moetrain", f.read())]
    texts = {}
    for row in linked:
        texts.setdefault(row["text"], []).append(f"{row['library']} {row['version']}")
    parts += [(", ".join(names), text) for text, names in texts.items()]
    parts.append(("files of the demo", "share/moetrain/configs: tiny-gptoss is CC0-1.0, its chat template Apache-2.0; "
                  "gsm8k is MIT (gsm8k/LICENSE)."))
    return "\n".join(f"{'=' * 80}\n{names}\n{'=' * 80}\n\n{text.strip()}\n" for names, text in parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("map", "version", "epoch", "out"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--cuda", default="NOASSERTION")
    args = parser.parse_args()
    linked = [package_of(path, args.cuda) for path in linked_archives(args.map)]
    os.makedirs(args.out, exist_ok=True)
    with open(os.path.join(args.out, "moetrain.spdx.json"), "w") as f:
        json.dump(spdx(args.version, int(args.epoch), linked), f, indent=1)
        f.write("\n")
    with open(os.path.join(args.out, "copyright"), "w") as f:
        f.write(licences(linked))


if __name__ == "__main__":
    main()
