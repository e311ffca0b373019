# Starts one server and stays between it and the test that wants it. However the
# test ends, the pipe on standard input ends with it; then the server goes, and
# its folder $1 too. Orders come a line each and are answered by a line.
dir=$1
pid=

# Nothing else may be held open: a reader of the test's output would wait for us.
exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-

finish() {
    trap '' HUP INT TERM
    if [ -n "$pid" ]; then
        # Stopped first, so that no child is missed: Postgres has many, and they
        # outlive their parent when they are stopped themselves.
        kill -STOP "$pid"
        kill -KILL "$pid" $(grep -l "^PPid:[[:space:]]*$pid\$" /proc/[0-9]*/status | cut -d/ -f3)
        wait "$pid"
    fi
    # A killed Postgres leaves a small piece of shared memory behind, for good. Where
    # root is not all-powerful, only its owner may remove it.
    if [ -r "$dir/data/postmaster.pid" ]; then
        shared=$(sed -n '7s/.* //p' "$dir/data/postmaster.pid")
        owner=$(stat -c %u "$dir/data/postmaster.pid")
        ipcrm -m "$shared" || setpriv --reuid="$owner" --clear-groups ipcrm -m "$shared"
    fi
    # Once more if a child that was just ending wrote something meanwhile.
    rm -rf "$dir" || rm -rf "$dir"
    exit 0
}
trap finish HUP INT TERM
# An answer that nobody reads any more must not end us before the server. Not
# ignored, as the server would inherit that.
trap : PIPE

while read -r order; do
    case $order in
        start)
            sh "$dir/command" </dev/null >>"$dir/log" 2>&1 &
            pid=$!
            echo "$pid"
            ;;
        wait)
            wait "$pid"
            pid=
            echo done
            ;;
    esac
done
finish
