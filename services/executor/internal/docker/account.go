package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
)

// defaultUserName is the name that a container's user gets if the image has no account with the user's number.
const defaultUserName = "agent"

// accountFiles are the names of the files in /etc that list users and groups.
var accountFiles = []string{"passwd", "group"}

// accountFolder is the folder of the passwd and group files in a helper container.
const accountFolder = "v/user/"

// accountFileName returns the name of the file in a user's volume that containers of this image mount as /etc/passwd or
// /etc/group. file is passwd or group.
func (pic imageInfo) accountFileName(file string) string {
	id := strings.TrimPrefix(pic.id, "sha256:")
	return id[:min(len(id), 12)] + "." + file
}

// account has the fields of a user's entry in /etc/passwd, except the user's number.
type account struct{ name, home, shell string }

// accountOf returns the account of the user who, a name or a number, in an image's passwd file, or a default account if the
// image has none.
func accountOf(passwd []byte, who string) account {
	for line := range strings.Lines(string(passwd)) {
		if f := strings.Split(strings.TrimSpace(line), ":"); len(f) == 7 && (f[0] == who || f[2] == who) {
			return account{name: f[0], home: f[5], shell: f[6]}
		}
	}
	return account{name: defaultUserName, home: homeDir, shell: "/bin/sh"}
}

// accountFile returns the content of the file of, passwd or group, for a container whose user has the number id: the image's
// file with an entry for the account. The entry replaces entries with the same name or number.
func (a account) accountFile(of string, image []byte, id int) []byte {
	line := fmt.Sprintf("%s:x:%d:", a.name, id)
	if of == "passwd" {
		line = fmt.Sprintf("%s:x:%d:%d::%s:%s", a.name, id, id, a.home, a.shell)
	}
	var out bytes.Buffer
	for l := range strings.Lines(string(image)) {
		f := strings.Split(strings.TrimSpace(l), ":")
		if len(f) < 3 || f[0] == a.name || f[2] == strconv.Itoa(id) {
			continue
		}
		out.WriteString(strings.TrimSpace(l) + "\n")
	}
	out.WriteString(line + "\n")
	return out.Bytes()
}

// volumeFolder is a folder in a volume, with the file mode that prepareVolumes sets.
type volumeFolder struct {
	helperVolume
	mode int64
}

// prepareVolumes makes the user u the owner of folders in volumes, and writes passwd and group files into the user's volume
// for containers of an image. name, a name or a number, selects the image's account whose entry is copied. home replaces the
// account's home folder, unless it is "".
func (p *Provider) prepareVolumes(ctx context.Context, pic imageInfo, u user, name, home string, folders ...volumeFolder) error {
	const what = "prepare the volumes"
	var volumes []helperVolume
	for _, f := range folders {
		volumes = append(volumes, f.helperVolume)
	}
	if u.dir != "" {
		volumes = append(volumes, helperVolume{userVolumeName(u.id), "user"})
	}
	if len(volumes) == 0 {
		return nil
	}
	helper, err := p.createHelper(ctx, "", pic.ref, volumes...)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	defer p.discardHelper(ctx, helper)
	var archive bytes.Buffer
	out := tar.NewWriter(&archive)
	// A tar header is enough to set the owner of a folder. The engine ignores the header of ".", so it is unpacked one
	// level above.
	for _, f := range folders {
		if err := out.WriteHeader(&tar.Header{Name: "v/" + f.folder + "/", Typeflag: tar.TypeDir, Mode: f.mode, Uid: u.id, Gid: u.id, ModTime: time.Now()}); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	if u.dir != "" {
		if err := p.writeAccounts(ctx, out, helper, pic, u, name, home); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	if err := out.Close(); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return wrapReplacedAccountFile(p.callEngineNoResult(ctx, what, func(ctx context.Context) error {
		return p.api.CopyToContainer(ctx, helper, "/", &archive, container.CopyToContainerOptions{})
	}))
}

// wrapReplacedAccountFile wraps an error of the engine in errVanished if a passwd or group file disappeared while the engine unpacked it:
// another executor that creates the same container writes the same file, and the engine removes a file before it writes it again.
func wrapReplacedAccountFile(err error) error {
	if err != nil && strings.Contains(err.Error(), accountFolder) && strings.Contains(err.Error(), syscall.ENOENT.Error()) {
		return fmt.Errorf("%w: %w", errVanished, err)
	}
	return err
}

// writeAccounts writes passwd and group files, with an entry for the user u, to a tar archive. They are based on the files of
// the image from which a helper container was created.
func (p *Provider) writeAccounts(ctx context.Context, out *tar.Writer, helper string, pic imageInfo, u user, name, home string) error {
	files, err := p.imageAccounts(ctx, helper, pic.id)
	if err != nil {
		return err
	}
	a := accountOf(files["passwd"], name)
	if home != "" {
		a.home = home
	}
	for _, f := range accountFiles {
		raw := a.accountFile(f, files[f], u.id)
		if err := out.WriteHeader(&tar.Header{Name: accountFolder + pic.accountFileName(f), Typeflag: tar.TypeReg, Mode: 0o444, Size: int64(len(raw)), ModTime: time.Now()}); err != nil {
			return err
		}
		if _, err := out.Write(raw); err != nil {
			return err
		}
	}
	return nil
}

// imageAccounts returns the content of the passwd and group files of the image from which a helper container was created, by
// file name.
func (p *Provider) imageAccounts(ctx context.Context, helper, image string) (map[string][]byte, error) {
	p.mu.Lock()
	known := p.accounts[image]
	p.mu.Unlock()
	if known != nil {
		return known, nil
	}
	files := map[string][]byte{}
	for _, f := range accountFiles {
		raw, err := callEngine(ctx, p, "read /etc/"+f+" of the image", func(ctx context.Context) ([]byte, error) { return p.readContainerFile(ctx, helper, "/etc/"+f) })
		if err != nil && !errdefs.IsNotFound(err) {
			return nil, err
		}
		files[f] = raw
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.accounts[image] = files
	return files, nil
}

// maxAccountFileBytes is the maximum number of bytes that are read of an image's passwd or group file.
const maxAccountFileBytes = 1 << 20

// readContainerFile returns the content of a regular file of a container. It returns nil if the file does not exist or is not
// regular.
func (p *Provider) readContainerFile(ctx context.Context, containerID, name string) ([]byte, error) {
	stream, _, err := p.api.CopyFromContainer(ctx, containerID, name)
	if err != nil {
		return nil, err
	}
	defer stream.Close() //nolint:errcheck // only read from
	in := tar.NewReader(stream)
	h, err := in.Next()
	if err != nil || h.Typeflag != tar.TypeReg {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(in, maxAccountFileBytes))
}
