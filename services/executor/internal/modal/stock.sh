# Unpacks the skill of the digest $1, a tar on stdin, where no agent can change it.
set -eu
umask 022
part="/bin/skills/.$1"
rm -rf "$part"
mkdir "$part"
tar -x -o -f - -C "$part"
chmod -R a+rX,go-w "$part"
mv "$part" "/bin/skills/$1"
