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

usage_error() {
  printf 'error: %s\nhelp: scripts/%s --help\n' "$1" "${0##*/}" >&2
  exit 2
}

# The flags' values, before parse_options has read any.
torch='' preset=release label='' install=yes part=all

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
      --format) part=format ;;
      *)
        [[ -n ${1:-} ]] || usage_error "$flag needs a value"
        printf -v "${flag#--}" '%s' "$1"
        shift
        ;;
    esac
  done
}
