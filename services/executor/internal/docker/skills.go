package docker

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"

	"github.com/spoolhq/spool/pkg/skill"
)

const (
	// skillsDir is where sandboxes see the engine's skills, each under its digest.
	// Nobody inside can list it: who does not know a digest finds nothing.
	skillsDir = "/bin/skills"
	// labelSkills is what the volume of skills is for. It has no role: no sweep takes it.
	labelSkills = "dev.spool.skills"
	// shelveWithin bounds the filling of one skill, waiting for others included.
	shelveWithin = 5 * time.Minute
)

// SkillsVolume is the name of the volume with an engine's skills.
func SkillsVolume(engine string) string { return prefix + "skills-" + engine }

// shelf makes sure that the volume of skills is there.
func (p *Provider) shelf(ctx context.Context, image string) error {
	name := SkillsVolume(p.cfg.Engine)
	l, err := p.volume(ctx, name)
	if err != nil || l[labelSkills] != "" {
		return err
	}
	p.mu.Lock()
	p.shelved = map[string]bool{}
	p.mu.Unlock()
	if err := p.makeVolume(ctx, name, map[string]string{labelVersion: layoutVersion, labelEngine: p.cfg.Engine, labelSkills: p.cfg.Engine}); err != nil {
		return err
	}
	helper, err := p.helper(ctx, "", image, volumeAt{name, "skills"})
	if err != nil {
		return fmt.Errorf("prepare the folder of skills: %w", err)
	}
	defer p.discard(ctx, helper)
	return p.stream(ctx, helper, "prepare the folder of skills", func(out *tar.Writer) error {
		return out.WriteHeader(&tar.Header{Name: "v/skills/", Typeflag: tar.TypeDir, Mode: 0o711, ModTime: time.Unix(0, 0)})
	})
}

// Shelve brings a skill into the volume that all sandboxes of the engine see.
// Among several executors the name of the helper container is the lock.
func (p *Provider) Shelve(ctx context.Context, digest string, zip func(context.Context) (*os.File, error)) (string, error) {
	dir := skillsDir + "/" + digest
	ctx, cancel := context.WithTimeout(ctx, shelveWithin)
	defer cancel()
	if err := p.shelf(ctx, p.cfg.Image); err != nil {
		return "", err
	}
	p.mu.Lock()
	there := p.shelved[digest]
	p.mu.Unlock()
	if there {
		return dir, nil
	}
	name := SkillsVolume(p.cfg.Engine)
	helper, err := p.lock(ctx, name+"-"+digest[:12], p.cfg.Image, volumeAt{name, "skills"})
	if err != nil {
		return "", fmt.Errorf("bring skill %s to the engine: %w", digest, err)
	}
	defer p.discard(ctx, helper)
	_, err = call(ctx, p, "look for a skill", func(ctx context.Context) (container.PathStat, error) {
		return p.api.ContainerStatPath(ctx, helper, "/v/skills/"+digest+"."+complete)
	})
	if errdefs.IsNotFound(err) {
		err = p.bringSkill(ctx, helper, digest, zip)
	}
	if err != nil {
		return "", err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shelved[digest] = true
	return dir, nil
}

// bringSkill copies a skill into the volume; the file that says so comes last.
func (p *Provider) bringSkill(ctx context.Context, helper, digest string, zip func(context.Context) (*os.File, error)) error {
	f, err := zip(ctx)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // only read from
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("bring skill %s to the engine: %w", digest, err)
	}
	return p.stream(ctx, helper, "bring skill "+digest+" to the engine", func(out *tar.Writer) error {
		if err := out.WriteHeader(&tar.Header{Name: "v/skills/" + digest + "/", Typeflag: tar.TypeDir, Mode: 0o555, ModTime: time.Unix(0, 0)}); err != nil {
			return err
		}
		if err := below("v/skills/"+digest+"/", out, func(w io.Writer) error { return skill.Tar(ctx, f, info.Size(), w) }); err != nil {
			return err
		}
		return out.WriteHeader(&tar.Header{Name: "v/skills/" + digest + "." + complete, Typeflag: tar.TypeReg, Mode: 0o444, ModTime: time.Unix(0, 0)})
	})
}

// below writes the entries of another tar with a folder before their names.
func below(folder string, out *tar.Writer, from func(io.Writer) error) error {
	reader, writer := io.Pipe()
	written := make(chan error, 1)
	go func() {
		err := from(writer)
		_ = writer.CloseWithError(err) // the reader gets it; closing a pipe never fails
		written <- err
	}()
	err := func() error {
		in := tar.NewReader(reader)
		for {
			h, err := in.Next()
			if errors.Is(err, io.EOF) {
				_, err = io.Copy(io.Discard, reader) // the writer ends with padding
				return err
			}
			if err != nil {
				return err
			}
			h.Name = folder + h.Name
			if err := out.WriteHeader(h); err != nil {
				return err
			}
			if _, err := io.Copy(out, in); err != nil { //nolint:gosec // the check of a skill bounds it
				return err
			}
		}
	}()
	_ = reader.CloseWithError(err) // frees the writer; closing a pipe never fails
	if werr := <-written; werr != nil && !errors.Is(werr, io.ErrClosedPipe) {
		return werr
	}
	return err
}

// stream copies a tar into a helper as it is written.
func (p *Provider) stream(ctx context.Context, helper, what string, write func(*tar.Writer) error) error {
	reader, writer := io.Pipe()
	written := make(chan error, 1)
	go func() {
		out := tar.NewWriter(writer)
		err := write(out)
		if err == nil {
			err = out.Close()
		}
		_ = writer.CloseWithError(err) // the reader gets it; closing a pipe never fails
		written <- err
	}()
	err := p.api.CopyToContainer(ctx, helper, "/", reader, container.CopyToContainerOptions{})
	_ = reader.Close() // frees the writer; closing a pipe never fails
	if werr := <-written; werr != nil && !errors.Is(werr, io.ErrClosedPipe) {
		return fmt.Errorf("%s: %w", what, werr)
	}
	return p.meaning(ctx, what, err)
}
