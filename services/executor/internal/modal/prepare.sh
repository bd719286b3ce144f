# Puts the runner, which is read from stdin and has the digest $1, and the folders of a sandbox into an image.
set -eu
umask 022
rm -rf /workspace
if [ -d /mnt/workspace ] && [ ! -L /mnt/workspace ]; then rm -rf /mnt/workspace; fi
mkdir -p /workspace /mnt /spool/bin /spool/state /spool/run /home/spool /bin/skills
ln -sfn /workspace /mnt/workspace
cat >/spool/bin/runner
echo "$1  /spool/bin/runner" | sha256sum -c - >/dev/null
chmod 555 /spool/bin/runner
chmod 711 /bin/skills
chown -R 10001:10001 /workspace /spool/state /spool/run /home/spool
chmod 700 /spool/state /spool/run
grep -q '^[^:]*:[^:]*:10001:' /etc/group || echo 'agent:x:10001:' >>/etc/group
grep -q '^[^:]*:[^:]*:10001:' /etc/passwd || echo 'agent:x:10001:10001::/home/spool:/bin/sh' >>/etc/passwd
