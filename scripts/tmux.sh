#!/usr/bin/env bash
# Shells for a run in tmux, panes named Trainer, Orchestrator and Inference, each with its log beside it.
#
#   bash scripts/tmux.sh [-s session] [-o output_dir]
#   bash scripts/tmux.sh exp-1          older spelling of: -s exp-1 -o outputs/exp-1
#   bash scripts/tmux.sh kill [-s session]
set -euo pipefail

session=prime-rl
output_dir=outputs
kill=false

usage() {
  sed -n '2,6s/^# \{0,1\}//p' "$0"
}

while [[ $# -gt 0 ]]; do
  case "$1" in
    -s | --session | -o | --output-dir)
      [[ $# -ge 2 ]] || { echo "error: $1 needs a value" >&2; exit 2; }
      if [[ "$1" == -s || "$1" == --session ]]; then session=$2; else output_dir=$2; fi
      shift 2
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    kill)
      kill=true
      shift
      ;;
    -*)
      echo "error: unknown option $1" >&2
      usage >&2
      exit 2
      ;;
    *)
      session=$1
      if ! $kill; then
        output_dir=outputs/$1
        echo "hint: today's spelling is: $0 -s $session -o $output_dir" >&2
      fi
      shift
      ;;
  esac
done

command -v tmux > /dev/null || { echo "error: tmux is not installed" >&2; exit 1; }

# '=' asks for this very name: tmux would accept a session that merely starts with it.
if $kill; then
  tmux kill-session -t "=$session"
  exit 0
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."  # where `uv run` works, and what a relative output_dir is relative to

if ! tmux has-session -t "=$session" 2> /dev/null; then
  mkdir -p "$output_dir/logs"
  row() { # pane of the shell, its name. A title could be changed by the shell's prompt, @name is ours
    local log="$output_dir/logs/${2,,}.log" beside
    # Also before the log exists, and after it is replaced.
    beside=$(tmux split-window -d -h -P -F '#{pane_id}' -t "$1" "$(printf 'tail -n 200 -F %q 2>/dev/null' "$log")")
    tmux set-option -p -t "$1" @name "$2"
    tmux set-option -p -t "$beside" @name "$log"
  }
  trainer=$(tmux new-session -d -s "$session" -n RL -x 200 -y 60 -P -F '#{pane_id}')
  orchestrator=$(tmux split-window -v -l 66% -P -F '#{pane_id}' -t "$trainer")
  inference=$(tmux split-window -v -l 50% -P -F '#{pane_id}' -t "$orchestrator")
  row "$trainer" Trainer
  row "$orchestrator" Orchestrator
  row "$inference" Inference
  tmux select-pane -t "$trainer"
  tmux set-option -w -t "=$session:RL" pane-border-status top
  tmux set-option -w -t "=$session:RL" pane-border-format ' #{@name} '
fi

if [[ -t 1 && -z "${TMUX:-}" ]]; then
  exec tmux attach-session -t "=$session"
fi
echo "session '$session' has a shell and a log (of $output_dir/logs) for each process: tmux attach -t $session"
