package workspace

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// TreeName is the name of one of the two trees of a snapshot: the workspace, or the agent's own records.
type TreeName string

// The trees.
const (
	TreeFiles   TreeName = wire.TreeWorkspace // the workspace
	TreeRecords TreeName = wire.TreeRecords   // the agent's own records
)

// Restore writes the files of a snapshot into a sandbox. It replaces files of the same paths and keeps others. It
// returns ErrNotFound if the snapshot does not exist. After an error the sandbox may contain a part of the files:
// restore again, or into another sandbox. The snapshot may belong to another session of the same tenant, as for a fork.
// If trees are given, only these are written.
func Restore(ctx context.Context, box sandbox.Sandbox, store Store, tenant, session, id string, trees ...TreeName) (Result, error) {
	began := time.Now()
	m, err := Open(ctx, store, tenant, session, id)
	if err != nil {
		return Result{}, err
	}
	if len(trees) > 0 {
		m.entries = slices.DeleteFunc(m.entries, func(e Entry) bool {
			tree, _, _ := strings.Cut(e.Path, "/")
			return !slices.Contains(trees, TreeName(tree))
		})
	}
	c, err := startCommand(ctx, box, "runner", "restore")
	if err != nil {
		return Result{}, err
	}
	r := &restoreRun{store: store, m: m, in: wire.NewWriter(c.p.Stdin()), out: wire.NewReader(c.p.Stdout())}
	err = r.sendTrees(ctx)
	var end wire.End
	if err == nil {
		if _, err = r.out.ReadHello(); err == nil {
			err = r.out.Expect(wire.FrameEnd, &end)
		}
	}
	if err := c.finish(err); err != nil {
		return Result{}, err
	}
	return Result{ID: id, Files: end.Files, Bytes: end.Bytes, Duration: time.Since(began)}, nil
}

// restoreRun is the state of one call of Restore.
type restoreRun struct {
	store Store
	m     *Manifest
	in    *wire.Writer
	out   *wire.Reader
}

// sendTrees sends the snapshot to the runner by the restore protocol of package wire, up to End. It reads each pack
// once.
func (r *restoreRun) sendTrees(ctx context.Context) error {
	if err := r.in.WriteJSON(wire.FrameHello, wire.Hello{Protocol: wire.ProtocolVersion}); err != nil {
		return err
	}
	for i := range r.m.entries {
		if err := r.in.WriteEntry(&r.m.entries[i]); err != nil {
			return err
		}
	}
	if err := r.in.WriteFrame(wire.FrameGo, nil); err != nil {
		return err
	}
	byPack := make([][]wire.Hash, len(r.m.packs))
	r.m.forEachBlock(func(h wire.Hash, _ int) {
		n := r.m.locations[h].pack
		byPack[n] = append(byPack[n], h)
	})
	var buf []byte
	for n, list := range byPack {
		if len(list) == 0 {
			continue
		}
		content, err := r.m.packs[n].readFrom(ctx, r.store, r.m.prefix, buf)
		if err != nil {
			return err
		}
		for _, h := range list {
			at := r.m.locations[h]
			b := content[at.offset : at.offset+at.length]
			if wire.HashOf(b) != h {
				return &CorruptError{Object: r.m.prefix + r.m.ID, Err: fmt.Errorf("block %s is not at its recorded location", h)}
			}
			if err := r.in.WriteFrame(wire.FrameBlock, b); err != nil {
				return err
			}
		}
		buf = content
	}
	return errors.Join(r.in.WriteJSON(wire.FrameEnd, wire.End{}), r.in.Flush())
}
