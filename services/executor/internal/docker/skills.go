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
	// skillsDir is where sandboxes see the engine's skills, each under its digest.
	// Nobody inside can list it: who does not know a digest finds nothing.
	skillsDir = "/bin/skills"
	// labelSkills is what the volume of skills is for. It has no role: no sweep takes it.
	labelSkills = "dev.spool.skills"
	// shelveWithin bounds the filling of a batch of skills, waiting for other executors included.
	shelveWithin = 5 * time.Minute
	// batchBytes of ZIPs are what one holder of the lock begins with; another who waits takes a lock for abandoned after stale.
	batchBytes = 64 << 20
)

// SkillsVolume is the name of the volume with an engine's skills.
func SkillsVolume(engine string) string { return prefix + "skills-" + engine }

// shelf creates the volume of skills unless it exists.
func (p *Provider) shelf(ctx context.Context, image string) error {
	name := SkillsVolume(p.cfg.Engine)
	l, err := p.volume(ctx, name)
	if err != nil || l[labelSkills] != "" {
		return err
	}
	p.skills.mu.Lock()
	clear(p.skills.there)
	p.skills.mu.Unlock()
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

// wanted is a skill that somebody waits for.
type wanted struct {
	digest string
	zip    func(context.Context) (*os.File, error)
	done   chan error // has room for the answer
}

// shelving is what the provider knows of its engine's skills.
type shelving struct {
	turn   chan struct{}   // whose it is brings all that is wanted
	mu     sync.Mutex      // guards what follows
	there  map[string]bool // skills that are on the engine, by digest
	wanted []*wanted
}

func newShelving() shelving {
	return shelving{turn: make(chan struct{}, 1), there: map[string]bool{}}
}

// Shelve brings a skill into the volume that all sandboxes of the engine see.
// A container and a copy into it take far longer than the copied bytes, so what
// is wanted meanwhile is brought together.
func (p *Provider) Shelve(ctx context.Context, digest string, zip func(context.Context) (*os.File, error)) (string, error) {
	dir := skillsDir + "/" + digest
	l, err := p.volume(ctx, SkillsVolume(p.cfg.Engine))
	if err != nil {
		return "", err
	}
	s, w := &p.skills, &wanted{digest, zip, make(chan error, 1)}
	s.mu.Lock()
	if l[labelSkills] != "" && s.there[digest] {
		s.mu.Unlock()
		return dir, nil
	}
	s.wanted = append(s.wanted, w)
	s.mu.Unlock()
	select {
	case s.turn <- struct{}{}:
		p.bringWanted(context.WithoutCancel(ctx)) // others wait for it too
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

// bringWanted brings what is wanted by now, and answers all who want it.
func (p *Provider) bringWanted(ctx context.Context) {
	s := &p.skills
	s.mu.Lock()
	batch := map[string][]*wanted{}
	for _, w := range s.wanted {
		batch[w.digest] = append(batch[w.digest], w)
	}
	s.wanted = nil
	s.mu.Unlock()
	if len(batch) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, shelveWithin)
	defer cancel()
	var list []*wanted
	for _, same := range batch {
		list = append(list, same[0])
	}
	errs := map[string]error{}
	for len(list) > 0 {
		list = p.bringSome(ctx, list, errs)
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

// bringSome brings as much as one holder of the lock may, and gives what is left;
// what failed is in errs. Among several executors the name of the helper container is the lock.
func (p *Provider) bringSome(ctx context.Context, list []*wanted, errs map[string]error) (left []*wanted) {
	helper, err := p.shelfHelper(ctx)
	if err != nil {
		fail(list, errs, err)
		return nil
	}
	defer p.discard(ctx, helper)
	var missing []*wanted
	for _, w := range list {
		_, err := call(ctx, p, "look for a skill", func(ctx context.Context) (container.PathStat, error) {
			return p.api.ContainerStatPath(ctx, helper, "/v/skills/"+w.digest+"."+complete)
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
	n, err := p.bringSkills(ctx, helper, missing, errs)
	if err != nil {
		fail(missing, errs, err)
		return nil
	}
	return missing[n:]
}

func fail(list []*wanted, errs map[string]error, err error) {
	for _, w := range list {
		if errs[w.digest] == nil {
			errs[w.digest] = fmt.Errorf("bring skill %s to the engine: %w", w.digest, err)
		}
	}
}

func (p *Provider) shelfHelper(ctx context.Context) (string, error) {
	if err := p.shelf(ctx, p.cfg.Image); err != nil {
		return "", err
	}
	name := SkillsVolume(p.cfg.Engine)
	return p.lock(ctx, name, p.cfg.Image, volumeAt{name, "skills"})
}

// bringSkills copies skills into the volume, and gives how many it came to before
// there were batchBytes; of each the file that says so comes last. One that cannot
// be had, or is broken, is left out, and has its error.
//
// Nothing is broken off for it: of a copy that was, the engine may still unpack
// what came of it when the next one has ended.
func (p *Provider) bringSkills(ctx context.Context, helper string, list []*wanted, errs map[string]error) (n int, err error) {
	err = p.stream(ctx, helper, "copy", func(out *tar.Writer) error {
		for written := int64(0); n < len(list) && written < batchBytes; {
			w := list[n]
			n++
			zip, size, err := w.whole(ctx)
			if err != nil {
				errs[w.digest] = err
				continue
			}
			err = shelve(ctx, w.digest, zip, size, out)
			if cerr := zip.Close(); err != nil || cerr != nil {
				return errors.Join(err, cerr)
			}
			written += size
		}
		return nil
	})
	return n, err
}

// whole returns a skill's ZIP and its size, once it was read to its end without an error.
func (w *wanted) whole(ctx context.Context) (*os.File, int64, error) {
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

// shelve writes a skill as its folder and the file that says that it is whole.
func shelve(ctx context.Context, digest string, zip *os.File, size int64, out *tar.Writer) error {
	if err := out.WriteHeader(&tar.Header{Name: "v/skills/" + digest + "/", Typeflag: tar.TypeDir, Mode: 0o555, ModTime: time.Unix(0, 0)}); err != nil {
		return err
	}
	if err := below("v/skills/"+digest+"/", out, func(w io.Writer) error { return skill.Tar(ctx, zip, size, w) }); err != nil {
		return err
	}
	return out.WriteHeader(&tar.Header{Name: "v/skills/" + digest + "." + complete, Typeflag: tar.TypeReg, Mode: 0o444, ModTime: time.Unix(0, 0)})
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
	return p.translate(ctx, what, err)
}
