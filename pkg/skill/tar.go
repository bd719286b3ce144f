package skill

import (
	"archive/tar"
	"context"
	"fmt"
	"io"
	"time"
)

// Tar writes the files of a skill's ZIP, as Extract would create them, as a tar: sorted, owned by root, with fixed
// times, so that a ZIP always gives the same bytes. It performs all checks of Check. After an error the output is a
// partial tar without its end.
func Tar(ctx context.Context, r io.ReaderAt, size int64, w io.Writer) error {
	a, err := openArchive(ctx, r, size, Limits{})
	if err != nil {
		return err
	}
	out := tar.NewWriter(w)
	for _, name := range a.folders {
		if err := out.WriteHeader(tarHeader(tar.TypeDir, name+"/", extractedFolderMode, 0)); err != nil {
			return fmt.Errorf("tar a skill: %w", err)
		}
	}
	err = a.forEachFile(ctx, func(e *zipEntry, content io.Reader) error {
		run, content, err := isScript(e.run, content)
		if err != nil {
			return err
		}
		mode := int64(extractedFileMode)
		if run {
			mode = extractedScriptMode
		}
		if err := out.WriteHeader(tarHeader(tar.TypeReg, e.name, mode, e.size)); err != nil {
			return fmt.Errorf("tar a skill: %w", err)
		}
		_, err = io.Copy(out, content)
		return err
	})
	if err != nil {
		return err
	}
	if err := out.Close(); err != nil {
		return fmt.Errorf("tar a skill: %w", err)
	}
	return nil
}

func tarHeader(kind byte, name string, mode, size int64) *tar.Header {
	return &tar.Header{Typeflag: kind, Name: name, Mode: mode, Size: size, ModTime: time.Unix(0, 0), Format: tar.FormatPAX}
}
