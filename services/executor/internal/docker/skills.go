package docker

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"

	"github.com/spoolhq/spool/pkg/skill"
)

const (
	// skillsDir is the folder in sandboxes with the skills of the engine, each in a folder named by its digest. Processes in a sandbox
	// cannot list skillsDir, so they find only skills whose digest they know.
	skillsDir = "/bin/skills"
	// labelSkills marks the volume of skills. The volume has no role label, so no sweep removes it.
	labelSkills = "dev.spool.skills"
	// copySkillsTimeout is the time limit for copying a batch of skills to the engine, including the wait for other
	// executors.
	copySkillsTimeout = 5 * time.Minute
	// skillBatchBytes is the total size of ZIPs after which one holder of the lock copies no further skill. It keeps the copy shorter than
	// abandonedAge, after which other executors would consider the lock abandoned.
	skillBatchBytes = 64 << 20
)

// SkillsVolume returns the name of the volume with an engine's skills.
func SkillsVolume(engine string) string { return namePrefix + "skills-" + engine }

// createSkillsVolume creates the volume with the engine's skills, unless it exists.
func (p *Provider) createSkillsVolume(ctx context.Context, image string) error {
	name := SkillsVolume(p.cfg.Engine)
	l, err := p.volumeLabels(ctx, name)
	if err != nil || l[labelSkills] != "" {
		return err
	}
	p.skills.mu.Lock()
	clear(p.skills.there)
	p.skills.mu.Unlock()
	if err := p.createVolume(ctx, name, map[string]string{labelVersion: labelsVersion, labelEngine: p.cfg.Engine, labelSkills: p.cfg.Engine}); err != nil {
		return err
	}
	helper, err := p.createHelper(ctx, "", image, helperVolume{name, "skills"})
	if err != nil {
		return fmt.Errorf("prepare the folder of skills: %w", err)
	}
	defer p.discardHelper(ctx, helper)
	return p.streamTar(ctx, helper, "prepare the folder of skills", func(out *tar.Writer) error {
		return out.WriteHeader(&tar.Header{Name: "v/skills/", Typeflag: tar.TypeDir, Mode: 0o711, ModTime: time.Unix(0, 0)})
	})
}

// wantedSkill is a skill for which callers of StoreSkill wait until it is on the engine.
type wantedSkill struct {
	digest string
	zip    func(context.Context) (*os.File, error)
	done   chan error // buffered
}

// skillStore records which skills are on the provider's engine, and which ones callers wait for.
type skillStore struct {
	turn   chan struct{}   // its holder copies all wanted skills
	mu     sync.Mutex      // guards the fields below
	there  map[string]bool // skills that are on the engine, by digest
	wanted []*wantedSkill
}

func newSkillStore() skillStore {
	return skillStore{turn: make(chan struct{}, 1), there: map[string]bool{}}
}

// StoreSkill copies a skill to the volume that all sandboxes of the engine mount, and returns the skill's folder in sandboxes. A copy
// needs a helper container, which takes much longer than the transfer, so all skills that callers request in the meantime are copied
// together.
func (p *Provider) StoreSkill(ctx context.Context, digest string, zip func(context.Context) (*os.File, error)) (string, error) {
	dir := skillsDir + "/" + digest
	l, err := p.volumeLabels(ctx, SkillsVolume(p.cfg.Engine))
	if err != nil {
		return "", err
	}
	s, w := &p.skills, &wantedSkill{digest, zip, make(chan error, 1)}
	s.mu.Lock()
	if l[labelSkills] != "" && s.there[digest] {
		s.mu.Unlock()
		return dir, nil
	}
	s.wanted = append(s.wanted, w)
	s.mu.Unlock()
	select {
	case s.turn <- struct{}{}:
		p.copyWantedSkills(context.WithoutCancel(ctx)) // others wait for it too
		<-s.turn
		err = <-w.done
	case err = <-w.done:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		return "", err
	}
	return dir, nil
}

// copyWantedSkills copies all skills that callers of StoreSkill have requested so far, and wakes the callers with the result.
func (p *Provider) copyWantedSkills(ctx context.Context) {
	s := &p.skills
	s.mu.Lock()
	batch := map[string][]*wantedSkill{}
	for _, w := range s.wanted {
		batch[w.digest] = append(batch[w.digest], w)
	}
	s.wanted = nil
	s.mu.Unlock()
	if len(batch) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, copySkillsTimeout)
	defer cancel()
	var list []*wantedSkill
	for _, same := range batch {
		list = append(list, same[0])
	}
	errs := map[string]error{}
	for len(list) > 0 {
		list = p.copySkillBatch(ctx, list, errs)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for digest, same := range batch {
		if errs[digest] == nil {
			s.there[digest] = true
		}
		for _, w := range same {
			w.done <- errs[digest]
		}
	}
}

// copySkillBatch copies as many skills of list as one holder of the lock may copy, and returns the remaining ones. It stores errors in
// errs, by digest. A helper container, whose name only one executor can create, is the lock.
func (p *Provider) copySkillBatch(ctx context.Context, list []*wantedSkill, errs map[string]error) (left []*wantedSkill) {
	helper, err := p.lockSkillsVolume(ctx)
	if err != nil {
		setMissingErrors(list, errs, err)
		return nil
	}
	defer p.discardHelper(ctx, helper)
	var missing []*wantedSkill
	for _, w := range list {
		_, err := callEngine(ctx, p, "look for a skill", func(ctx context.Context) (container.PathStat, error) {
			return p.api.ContainerStatPath(ctx, helper, "/v/skills/"+w.digest+"."+runnerCompleteFile)
		})
		switch {
		case errdefs.IsNotFound(err):
			missing = append(missing, w)
		case err != nil:
			errs[w.digest] = err
		}
	}
	if len(missing) == 0 {
		return nil
	}
	n, err := p.copySkills(ctx, helper, missing, errs)
	if err != nil {
		setMissingErrors(missing, errs, err)
		return nil
	}
	return missing[n:]
}

// setMissingErrors sets err as the error of each skill in list that has no error in errs yet.
func setMissingErrors(list []*wantedSkill, errs map[string]error, err error) {
	for _, w := range list {
		if errs[w.digest] == nil {
			errs[w.digest] = fmt.Errorf("copy skill %s to the engine: %w", w.digest, err)
		}
	}
}

// lockSkillsVolume creates the volume of skills, and a helper container that mounts it, and returns the container's id. The container's
// name is the lock on the volume.
func (p *Provider) lockSkillsVolume(ctx context.Context) (string, error) {
	if err := p.createSkillsVolume(ctx, p.cfg.Image); err != nil {
		return "", err
	}
	name := SkillsVolume(p.cfg.Engine)
	return p.createLockHelper(ctx, name, p.cfg.Image, helperVolume{name, "skills"})
}

// copySkills copies skills into the volume through a helper container, until the ZIPs have skillBatchBytes in total. It returns the
// number of skills of list that it handled. For each skill the file that marks it as complete comes last. A skill that cannot be read or
// is broken gets an error in errs. A copy is never interrupted, because the engine may continue to unpack what it has received after the
// next copy has ended.
func (p *Provider) copySkills(ctx context.Context, helper string, list []*wantedSkill, errs map[string]error) (n int, err error) {
	err = p.streamTar(ctx, helper, "copy", func(out *tar.Writer) error {
		for written := int64(0); n < len(list) && written < skillBatchBytes; {
			w := list[n]
			n++
			zip, size, err := w.fetchZIP(ctx)
			if err != nil {
				errs[w.digest] = err
				continue
			}
			err = writeSkill(ctx, w.digest, zip, size, out)
			if cerr := zip.Close(); err != nil || cerr != nil {
				return errors.Join(err, cerr)
			}
			written += size
		}
		return nil
	})
	return n, err
}

// fetchZIP returns the file with a skill's ZIP and its size, after it has read the file to its end without an error.
func (w *wantedSkill) fetchZIP(ctx context.Context) (*os.File, int64, error) {
	f, err := w.zip(ctx)
	if err != nil {
		return nil, 0, err
	}
	info, err := f.Stat()
	if err == nil {
		err = skill.Tar(ctx, f, info.Size(), io.Discard)
	}
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, info.Size(), nil
}

// writeSkill writes the folder of a skill to a tar archive, followed by the file that marks the skill as complete.
func writeSkill(ctx context.Context, digest string, zip *os.File, size int64, out *tar.Writer) error {
	if err := out.WriteHeader(&tar.Header{Name: "v/skills/" + digest + "/", Typeflag: tar.TypeDir, Mode: 0o555, ModTime: time.Unix(0, 0)}); err != nil {
		return err
	}
	if err := copyTarBelow("v/skills/"+digest+"/", out, func(w io.Writer) error { return skill.Tar(ctx, zip, size, w) }); err != nil {
		return err
	}
	return out.WriteHeader(&tar.Header{Name: "v/skills/" + digest + "." + runnerCompleteFile, Typeflag: tar.TypeReg, Mode: 0o444, ModTime: time.Unix(0, 0)})
}

// copyTarBelow copies the entries of the tar archive that from writes to out, and puts the path folder in front of their names.
func copyTarBelow(folder string, out *tar.Writer, from func(io.Writer) error) error {
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

// streamTar copies the tar archive that write produces into a helper container while it is written.
func (p *Provider) streamTar(ctx context.Context, helper, what string, write func(*tar.Writer) error) error {
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
	return p.translateError(ctx, what, err)
}
