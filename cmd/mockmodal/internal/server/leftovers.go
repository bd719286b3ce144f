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
	"github.com/gofrs/flock"
)

// lockFileName is the name of the file in a data folder that a server keeps locked while it runs.
const lockFileName = "lock"

// ownerFileName is the name of the file in a folder of sockets that contains the path of the owning server's data
// folder.
const ownerFileName = "owner"

// lockDataFolder locks a data folder. It returns an error if another server holds the lock.
func lockDataFolder(data string) (*flock.Flock, error) {
	lock := flock.New(filepath.Join(data, lockFileName))
	locked, err := lock.TryLock()
	if err == nil && !locked {
		err = fmt.Errorf("another server uses the data folder %s", data)
	}
	return lock, err
}

// hasRunningServer reports whether a mockmodal server runs on a data folder. It also returns true if the folder exists
// but cannot be read.
func hasRunningServer(data string) bool {
	if _, err := os.Stat(data); errors.Is(err, fs.ErrNotExist) {
		return false
	}
	lock := flock.New(filepath.Join(data, lockFileName), flock.SetFlag(os.O_RDONLY))
	locked, err := lock.TryRLock()
	return !locked || err != nil || lock.Unlock() != nil
}

// createSocketFolder creates the folder for the Unix sockets of guests. The folder is outside of the data folder,
// because the path of a Unix socket must be short.
func createSocketFolder(data string) (string, error) {
	folder, err := os.MkdirTemp("", "mockmodal-")
	if err != nil {
		return "", err
	}
	return folder, os.WriteFile(filepath.Join(folder, ownerFileName), []byte(data), 0o600)
}

// removeLeftovers removes the Docker objects and folders of servers that were killed: of the last server on this data
// folder, and of servers on other data folders that no longer run.
func (e *dockerEngine) removeLeftovers(ctx context.Context) error {
	owners, err := e.findDataFolders(ctx)
	if err != nil {
		return err
	}
	for owner := range owners {
		if owner == e.owner || hasRunningServer(owner) {
			continue
		}
		if err := e.removeServerObjects(ctx, owner); err != nil { // another server may remove the same objects at the same time
			e.logger.Warn("remove what a killed server left", "data", owner, "error", err)
		}
	}
	return e.removeServerObjects(ctx, e.owner)
}

// findDataFolders returns the data folders of all servers that own an object on the Docker engine, or a folder of
// sockets on this machine.
func (e *dockerEngine) findDataFolders(ctx context.Context) (map[string]bool, error) {
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
	for _, owner := range findSocketFolders() {
		owners[owner] = true
	}
	return owners, errors.Join(err, listErr, imageErr)
}

// findSocketFolders returns the folders of sockets on this machine, each with the data folder of the server that created
// it.
func findSocketFolders() map[string]string {
	found := map[string]string{}
	files, _ := filepath.Glob(filepath.Join(os.TempDir(), "mockmodal-*", ownerFileName)) // the pattern is valid
	for _, file := range files {
		if owner, err := os.ReadFile(file); err == nil {
			found[filepath.Dir(file)] = string(owner)
		}
	}
	return found
}

// removeServerObjects removes the containers, networks, images and folders of sockets of the server with the data
// folder owner.
func (e *dockerEngine) removeServerObjects(ctx context.Context, owner string) error {
	mine := filters.NewArgs(filters.Arg("label", ownerLabel+"="+owner))
	containers, err := e.api.ContainerList(ctx, container.ListOptions{All: true, Filters: mine})
	if err != nil {
		return fmt.Errorf("list containers: %w", err)
	}
	for _, c := range containers {
		err = errors.Join(err, e.removeContainer(ctx, c.ID))
	}
	networks, listErr := e.api.NetworkList(ctx, network.ListOptions{Filters: mine})
	err = errors.Join(err, listErr)
	for _, n := range networks {
		err = errors.Join(err, ignoreMissing(e.api.NetworkRemove(ctx, n.ID)))
	}
	for folder, its := range findSocketFolders() {
		if its == owner {
			err = errors.Join(err, os.RemoveAll(folder))
		}
	}
	return errors.Join(err, e.removeImages(ctx, mine))
}
