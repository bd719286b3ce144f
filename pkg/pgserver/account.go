package pgserver

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// postgresAccount is the operating system user that runs Postgres: the current user or, because Postgres refuses to run
// as root, an unprivileged user.
type postgresAccount struct {
	name     string
	uid, gid int
	switched bool
}

func unprivilegedAccount() (postgresAccount, error) {
	if os.Geteuid() != 0 {
		return postgresAccount{name: strconv.Itoa(os.Geteuid()), uid: os.Geteuid(), gid: os.Getegid()}, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uerr := strconv.Atoi(u.Uid)
		gid, gerr := strconv.Atoi(u.Gid)
		if uerr == nil && gerr == nil && uid > 0 {
			return postgresAccount{name: name, uid: uid, gid: gid, switched: true}, nil
		}
	}
	return postgresAccount{}, errors.New("postgres: cannot run as root, and the users postgres and nobody do not exist: run as another user, or set SPOOL_DATABASE_URL")
}

// runAs makes cmd run as the account.
func (a postgresAccount) runAs(cmd *exec.Cmd) {
	if !a.switched {
		return
	}
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(a.uid), Gid: uint32(a.gid)}
}

// chown changes the owner of path and everything below it to the account. It skips a cluster that the account owns
// already.
func (a postgresAccount) chown(path string) error {
	if !a.switched {
		return nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && int(st.Uid) == a.uid {
		return nil
	}
	// The top folder is changed last, so that an interrupted change is resumed.
	err = filepath.WalkDir(path, func(p string, _ fs.DirEntry, err error) error {
		if err != nil || p == path {
			return err
		}
		return os.Lchown(p, a.uid, a.gid)
	})
	if err != nil {
		return err
	}
	return os.Lchown(path, a.uid, a.gid)
}

// canEnter reports whether the account may enter path and every folder above it.
func (a postgresAccount) canEnter(path string) bool {
	if !a.switched {
		return true
	}
	for {
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm()&0o001 == 0 {
			return false
		}
		parent := filepath.Dir(path)
		if parent == path {
			return true
		}
		path = parent
	}
}
