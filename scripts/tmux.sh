#!/usr/bin/env bash
# Follow the logs of a run in tmux: trainer, orchestrator and inference, one pane each, and a shell of its own.
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

if ! tmux has-session -t "=$session" 2> /dev/null; then
  mkdir -p "$output_dir/logs"
  follow() { # the command that follows one log, also before it exists and after it is replaced
    printf 'tail -n 200 -F %q 2>/dev/null' "$output_dir/logs/$1.log"
  }
  add_pane() { # name
    tmux select-pane -T "$1" -t "$(tmux split-window -v -P -F '#{pane_id}' -t "=$session:Logs" "$(follow "$1")")"
    tmux select-layout -t "=$session:Logs" even-vertical > /dev/null
  }
  first=$(tmux new-session -d -s "$session" -n Logs -x 200 -y 60 -P -F '#{pane_id}' "$(follow trainer)")
  tmux select-pane -T trainer -t "$first"
  add_pane orchestrator
  add_pane inference
  tmux set-option -w -t "=$session:Logs" pane-border-status top > /dev/null
  tmux set-option -w -t "=$session:Logs" pane-border-format ' #{pane_title} ' > /dev/null
  tmux new-window -d -t "=$session:" -n Shell
fi

if [[ -t 1 && -z "${TMUX:-}" ]]; then
  exec tmux attach-session -t "=$session"
fi
echo "session '$session' follows $output_dir/logs: tmux attach -t $session"
