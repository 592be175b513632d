"""Install PyTorch into this environment: the CUDA build where an NVIDIA driver answers, else the CPU build.

PyPI's Linux build brings gigabytes of CUDA libraries. uv knows PyTorch's own CPU builds; where those cannot be reached,
pip takes what the configured index or wheel folder has.
"""

import importlib.util
import shutil
import subprocess
import sys

REQUIREMENT = "torch==2.13.0"


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def has_gpu() -> bool:
    driver = shutil.which("nvidia-smi")
    return driver is not None and subprocess.run([driver, "-L"], capture_output=True).returncode == 0


def main() -> None:
    if importlib.util.find_spec("torch") is not None:
        return
    print(f"installing {REQUIREMENT}", flush=True)
    if not has_gpu():
        pip("install", "--quiet", "uv")
        uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
        if subprocess.run([*uv, "--torch-backend", "cpu", REQUIREMENT], capture_output=True).returncode == 0:
            return
    pip("install", "--quiet", REQUIREMENT)


if __name__ == "__main__":
    main()
