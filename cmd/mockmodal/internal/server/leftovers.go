package server

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	dockerimage "github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/network"
	"golang.org/x/sys/unix"
)

// A server holds a lock on this file in its data folder as long as it runs.
const lockFile = "lock"

// ownerFile is in a folder of sockets and holds the server's data folder.
const ownerFile = "owner"

// lock takes the lock of a data folder.
func lock(data string) (*os.File, error) {
	file, err := os.OpenFile(filepath.Join(data, lockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("another server uses the data folder %s: %w", data, err), file.Close())
	}
	return file, nil
}

// isServed reports whether a server runs with a data folder. A folder that is
// gone has none; one that cannot be read may have one.
func isServed(data string) bool {
	if _, err := os.Stat(data); errors.Is(err, fs.ErrNotExist) {
		return false
	}
	file, err := os.Open(filepath.Join(data, lockFile))
	if err != nil {
		return true
	}
	defer file.Close() //nolint:errcheck // read only
	return unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil
}

// newSocketFolder creates the folder for the guests' sockets. It is outside of
// the data folder, whose path may be too long for a socket's.
func newSocketFolder(data string) (string, error) {
	folder, err := os.MkdirTemp("", "mockmodal-")
	if err != nil {
		return "", err
	}
	return folder, os.WriteFile(filepath.Join(folder, ownerFile), []byte(data), 0o600)
}

// removeLeftovers removes what servers left that were killed: the one that had
// this server's data folder, and all others that do not run any more.
func (e *engine) removeLeftovers(ctx context.Context) error {
	owners, err := e.owners(ctx)
	if err != nil {
		return err
	}
	for owner := range owners {
		if owner == e.owner || isServed(owner) {
			continue
		}
		if err := e.removeAll(ctx, owner); err != nil { // another server may remove the same things
			e.logger.Warn("remove what a killed server left", "data", owner, "error", err)
		}
	}
	return e.removeAll(ctx, e.owner)
}

// owners returns the data folders of all servers that have something on the
// engine, or a folder of sockets.
func (e *engine) owners(ctx context.Context) (map[string]bool, error) {
	owners := map[string]bool{}
	marked := filters.NewArgs(filters.Arg("label", ownerLabel))
	containers, err := e.api.ContainerList(ctx, container.ListOptions{All: true, Filters: marked})
	for _, c := range containers {
		owners[c.Labels[ownerLabel]] = true
	}
	networks, listErr := e.api.NetworkList(ctx, network.ListOptions{Filters: marked})
	for _, n := range networks {
		owners[n.Labels[ownerLabel]] = true
	}
	images, imageErr := e.api.ImageList(ctx, dockerimage.ListOptions{All: true, Filters: marked})
	for _, i := range images {
		owners[i.Labels[ownerLabel]] = true
	}
	for _, owner := range socketFolders() {
		owners[owner] = true
	}
	return owners, errors.Join(err, listErr, imageErr)
}

// socketFolders returns the folders of sockets on this machine, with their
// servers' data folders.
func socketFolders() map[string]string {
	found := map[string]string{}
	files, _ := filepath.Glob(filepath.Join(os.TempDir(), "mockmodal-*", ownerFile)) // the pattern is valid
	for _, file := range files {
		if owner, err := os.ReadFile(file); err == nil {
			found[filepath.Dir(file)] = string(owner)
		}
	}
	return found
}

// removeAll removes the containers, the networks, the images and the sockets of
// one server.
func (e *engine) removeAll(ctx context.Context, owner string) error {
	mine := filters.NewArgs(filters.Arg("label", ownerLabel+"="+owner))
	containers, err := e.api.ContainerList(ctx, container.ListOptions{All: true, Filters: mine})
	if err != nil {
		return fmt.Errorf("list containers: %w", err)
	}
	for _, c := range containers {
		err = errors.Join(err, e.remove(ctx, c.ID))
	}
	networks, listErr := e.api.NetworkList(ctx, network.ListOptions{Filters: mine})
	err = errors.Join(err, listErr)
	for _, n := range networks {
		err = errors.Join(err, ignoreMissing(e.api.NetworkRemove(ctx, n.ID)))
	}
	for folder, its := range socketFolders() {
		if its == owner {
			err = errors.Join(err, os.RemoveAll(folder))
		}
	}
	return errors.Join(err, e.removeImages(ctx, mine))
}
