# Sourced by deepspeed.sh and no_ssh.sh: sets HOSTFILE, and stops where DeepSpeed could not read it.
HOSTFILE=${HOSTFILE:-launch/hostfile}
refuse() {
  echo "error: $HOSTFILE$1" >&2
  exit 2
}
# without a hostfile the launcher would train on each node alone
[ -f "$HOSTFILE" ] || refuse ": no such file. Write one as in launch/hostfile.example, or set HOSTFILE."
number=0 nodes=" "
while read -r line || [ -n "$line" ]; do
  number=$((number + 1)) line=${line%$'\r'}
  [[ $line =~ ^(#|$) ]] && continue
  # deepspeed 0.19.8 ends in a traceback that names no file and no line
  [[ $line =~ ^([^[:space:]]+)[[:space:]]+slots=[0-9]+ ]] ||
    refuse ", line $number: \`$line\`. Write a node and its number of processes, such as: gpu01 slots=8"
  [[ $nodes != *" ${BASH_REMATCH[1]} "* ]] || refuse ", line $number: ${BASH_REMATCH[1]} is there twice. Keep one."
  nodes+="${BASH_REMATCH[1]} "
done <"$HOSTFILE"
[ "$nodes" != " " ] || refuse ": no node in it. Write one a line, such as: gpu01 slots=8"
