package guest

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// packFolder writes the content of a folder to w as a tar archive. Hard links become files, and sockets are left out.
func packFolder(w io.Writer, folder string) error {
	archive := tar.NewWriter(w)
	err := filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(folder, path)
		if err != nil {
			return err
		}
		return packEntry(archive, path, name, entry)
	})
	return errors.Join(err, archive.Close())
}

// packEntry writes the file, folder or link at path to a tar archive under name. It leaves out sockets, and files that
// were removed in the meantime.
func packEntry(archive *tar.Writer, path, name string, entry fs.DirEntry) error {
	info, err := entry.Info()
	if errors.Is(err, fs.ErrNotExist) || err == nil && info.Mode()&fs.ModeSocket != 0 {
		return nil
	}
	if err != nil {
		return err
	}
	target := ""
	if info.Mode()&fs.ModeSymlink != 0 {
		if target, err = os.Readlink(path); err != nil {
			return err
		}
	}
	header, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return err
	}
	header.Name = name
	if err := archive.WriteHeader(header); err != nil || !info.Mode().IsRegular() {
		return err
	}
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close() //nolint:errcheck // read only
	_, err = io.CopyN(archive, file, header.Size)
	return err
}

// unpackFolder extracts a tar archive into a folder, with owners and modes.
func unpackFolder(r io.Reader, folder string) error {
	archive := tar.NewReader(r)
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		path := filepath.Join(folder, filepath.Join("/", header.Name))
		if err := unpackEntry(archive, header, path); err != nil {
			return fmt.Errorf("unpack %s: %w", header.Name, err)
		}
	}
}

// unpackEntry creates the file, folder or link that an entry of a tar archive describes, at path.
func unpackEntry(archive io.Reader, header *tar.Header, path string) error {
	mode := header.FileInfo().Mode()
	switch header.Typeflag {
	case tar.TypeDir:
		if err := os.MkdirAll(path, mode.Perm()); err != nil {
			return err
		}
	case tar.TypeSymlink:
		if err := os.Symlink(header.Linkname, path); err != nil {
			return err
		}
		return os.Lchown(path, header.Uid, header.Gid)
	case tar.TypeReg:
		file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, mode.Perm())
		if err != nil {
			return err
		}
		_, err = io.Copy(file, archive)
		if err := errors.Join(err, file.Close()); err != nil {
			return err
		}
	case tar.TypeFifo:
		if err := syscall.Mkfifo(path, uint32(mode.Perm())); err != nil {
			return err
		}
	default:
		return fmt.Errorf("type %q is not implemented", header.Typeflag)
	}
	if err := os.Lchown(path, header.Uid, header.Gid); err != nil {
		return err
	}
	if err := os.Chmod(path, mode); err != nil {
		return err
	}
	return os.Chtimes(path, header.ModTime, header.ModTime)
}
