# The trainer with CUDA builds of PyTorch:   docker build -t fivefold .
#   docker run --rm fivefold predict llama3-8b h100:8 "dp8 zero3 mbs1"
#   docker run --rm --gpus all --ipc host -v "$PWD:/work" fivefold train run.toml
FROM python:3.12-slim
# Of a compiler any version will do, and pinned ones vanish from the mirror.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY docs docs
COPY fivefold fivefold
RUN pip install --no-cache-dir -c constraints.txt '.[train,show]'
WORKDIR /work
ENTRYPOINT ["fivefold"]
CMD ["--help"]
