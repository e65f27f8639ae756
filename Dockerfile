# CPU:   docker build -t rankgrad .
# CUDA:  docker build -t rankgrad:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
# with the kernels of the default loss compiled for some GPUs:  --build-arg GPUS="h100 a100"
#
#   docker run --rm rankgrad demo
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" rankgrad:cuda train --data /work/images --out /work/runs/mine
FROM python:3.12-slim

# Triton compiles a small launcher at run time
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# torch brings CUDA's libraries with it, so both images have the same base
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir torch torchvision --index-url "$TORCH_INDEX"

COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir "/src[all]" && rm -rf /src

# the folder is the user's own, so that commands can write without one being mounted
RUN useradd --create-home rankgrad && install --directory --owner rankgrad /work
USER rankgrad
WORKDIR /work

# without a GPU; the first training step then loads them
ARG GPUS=""
RUN for gpu in $GPUS; do rankgrad compile --gpu "$gpu" || exit 1; done

ENTRYPOINT ["rankgrad"]
CMD ["--help"]
