#!/usr/bin/env bash
# Trains on all hosts of a Cloud TPU slice, from a machine with gcloud and this checkout.
#
#   export TPU=my-slice ZONE=us-east5-a
#   launch/tpu_pod.sh setup 10.0.0.2:/runs     # once: commit, environment, an NFS share at /mnt/runs
#   launch/tpu_pod.sh run --config=configs/qwen1_5b.py --workdir=/mnt/runs/qwen
#   launch/tpu_pod.sh log                      # what host 0 prints; log 3: what host 3 prints
#   launch/tpu_pod.sh stop                     # after the tick in hand, saved; run goes on
set -euo pipefail
cd "$(dirname "$0")/.."
: "${TPU:?TPU=name of the slice}" "${ZONE:?ZONE=where it is}"

on() {  # on WORKER COMMAND: there, from the copy of the checkout
  gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker="$1" \
    --command="mkdir -p s3ac-jax && cd s3ac-jax && $2"
}

case "${1:-}" in
  setup)
    share=${2:?the NFS share, HOST:/PATH}
    archive=$(mktemp -d)/s3ac-jax.tar
    git archive --output="$archive" HEAD
    gcloud compute tpus tpu-vm scp "$archive" "$TPU": --zone="$ZONE" --worker=all
    on all "tar -xf ../s3ac-jax.tar && python3 -m venv .venv &&
      .venv/bin/pip install -q -e '.[train,report,hf,grade,data]' -r requirements-tpu.txt \
        -c requirements.txt &&
      sudo apt-get install -y -q nfs-common && sudo mkdir -p /mnt/runs &&
      (mountpoint -q /mnt/runs || sudo mount -t nfs $(printf '%q' "$share") /mnt/runs) &&
      sudo chmod a+rwx /mnt/runs"
    ;;
  run)
    shift
    flags=$(printf '%q ' "$@")
    # No terminal: a broken connection must not end the run.
    on all "(setsid nohup .venv/bin/python launch/train.py $flags --distributed \
      > train.log 2>&1 < /dev/null & echo \$! > train.pid)"
    ;;
  log) on "${2:-0}" "tail -n 50 -f train.log" ;;
  # To one host: all stop at the same tick.
  stop) on 0 "kill -TERM \$(cat train.pid)" ;;
  *)
    echo "launch/tpu_pod.sh setup SHARE | run FLAGS | log [HOST] | stop" >&2
    exit 2
    ;;
esac
