# shellcheck shell=bash disable=SC2034  # variables cross between the sourced files
# What every script here shares: the repository's root, messages, and the flags.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

say() { printf '\n== %s\n' "$*"; }
warn() { printf 'warning: %s\n' "$*" >&2; }

# fail MESSAGE HELP...: one message, one or more remedies, exit status 1.
fail() {
  printf 'error: %s\n' "$1" >&2
  shift
  (($# == 0)) || printf 'help: %s\n' "$@" >&2
  exit 1
}

# phase NAME: the part of the work that begins now; print_phases tells how long each took. .ci/run
# collects the phases of all scripts in LOCKSTEP_PHASES.
phase_name='' phase_begun=0
phases=''
phase() {
  [[ -z $phase_name ]] || phases+="$phase_name $((SECONDS - phase_begun))"$'\n'
  phase_name=$1 phase_begun=$SECONDS
}
print_phases() {
  phase ''
  [[ -z ${LOCKSTEP_PHASES:-} ]] || { printf '%s' "$phases" >>"$LOCKSTEP_PHASES" && phases=$(<"$LOCKSTEP_PHASES"); }
  awk '{ if (!($1 in seconds)) order[++parts] = $1; seconds[$1] += $2; total += $2 }
    END {
      for (i = 1; i <= parts; ++i) printf "  %-9s %3d min %02d s\n", order[i], seconds[order[i]] / 60, seconds[order[i]] % 60
      printf "  %-9s %3d min %02d s\n", "total", total / 60, total % 60
    }' <<<"${phases%$'\n'}"
}

usage_error() {
  printf 'error: %s\nhelp: scripts/%s --help\n' "$1" "${0##*/}" >&2
  exit 2
}

# The flags' values, before parse_options has read any.
torch='' preset=release label='' prefix='' install=yes part=all

# parse_options "FLAGS" "$@": FLAGS names those the calling script takes. The script defines usage().
parse_options() {
  local accepted=" $1 --help " flag
  shift
  while (($#)); do
    flag=$1
    shift
    if [[ $flag == --*=* ]]; then
      set -- "${flag#*=}" "$@"
      flag=${flag%%=*}
    fi
    [[ $accepted == *" $flag "* ]] || usage_error "unknown flag '$flag'"
    case $flag in
      --help) usage && exit 0 ;;
      --no-install) install=no ;;
      --format | --shell | --tidy) part=${flag#--} ;;
      *)
        [[ -n ${1:-} ]] || usage_error "$flag needs a value"
        printf -v "${flag#--}" '%s' "$1"
        shift
        ;;
    esac
  done
}
