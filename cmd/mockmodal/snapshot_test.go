package main_test

import (
	"errors"
	"testing"
	"time"

	modal "github.com/modal-labs/modal-client/go"
)

func TestSnapshot_FilesystemIsPublishedRestoredAndDeleted(t *testing.T) {
	b := newBed(t)
	sb := b.create(&modal.SandboxCreateParams{BlockNetwork: true, Env: map[string]string{"SECRET": "hidden"}})
	b.expect(sb, "mkdir -p /workspace && echo kept > /workspace/note && chown 1234 /workspace/note && sleep 600 > /dev/null 2>&1 & sleep 0; until test -s /workspace/note; do :; done; echo ok", "ok")
	image, err := sb.SnapshotFilesystem(b.ctx, &modal.SandboxSnapshotFilesystemParams{TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if err := image.Publish(b.ctx, "spool-work:sbx_1", nil); err != nil {
		t.Fatal(err)
	}
	if _, err := sb.Terminate(b.ctx, nil); err != nil {
		t.Fatal(err)
	}
	named, err := b.client.Images.FromName(b.ctx, "spool-work:sbx_1", nil)
	if err != nil {
		t.Fatal(err)
	}
	restored := b.createFrom(named, nil)
	b.expect(restored, "cat /workspace/note; stat -c %u /workspace/note; echo $SECRET", "kept\n1234")
	if err := b.client.Images.Delete(b.ctx, named.ImageID, nil); err != nil {
		t.Fatal(err)
	}
	var missing modal.NotFoundError
	if _, err := b.client.Images.FromName(b.ctx, "spool-work:sbx_1", nil); !errors.As(err, &missing) {
		t.Errorf("the name of a deleted image: %v", err)
	}
	if _, err := b.client.Sandboxes.Create(b.ctx, b.app, named, nil); err == nil {
		t.Error("a sandbox was created from a deleted image")
	}
	b.expect(restored, "cat /workspace/note", "kept")
	b.noViolations()
}

func TestSnapshot_ExpiresAfterItsTime(t *testing.T) {
	b := newBed(t)
	sb := b.create(nil)
	image, err := sb.SnapshotFilesystem(b.ctx, &modal.SandboxSnapshotFilesystemParams{TTL: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	for {
		_, err := b.client.Images.FromID(b.ctx, image.ImageID, nil)
		var missing modal.NotFoundError
		if errors.As(err, &missing) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestSnapshot_DirectoryIsMountedElsewhere(t *testing.T) {
	b := newBed(t)
	sb := b.create(nil)
	b.expect(sb, "mkdir -p /work/sub && echo inner > /work/sub/file && ln -s sub/file /work/link && chmod 4750 /work/sub/file && echo ok", "ok")
	image, err := sb.SnapshotDirectory(b.ctx, "/work", nil)
	if err != nil {
		t.Fatal(err)
	}
	other := b.create(nil)
	b.expect(other, "mkdir -p /data && echo below > /data/own && echo ok", "ok")
	if err := other.MountImage(b.ctx, "/data", image, nil); err != nil {
		t.Fatal(err)
	}
	b.expect(other, "cat /data/link; stat -c %a /data/sub/file; ls /data; echo more > /data/new", "inner\n4750\nlink\nsub")
	again, err := other.SnapshotDirectory(b.ctx, "/data", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := other.UnmountImage(b.ctx, "/data", nil); err != nil {
		t.Fatal(err)
	}
	b.expect(other, "ls /data", "own")
	if err := sb.MountImage(b.ctx, "/fresh", again, nil); err != nil {
		t.Fatal(err)
	}
	b.expect(sb, "cat /fresh/new", "more")
	if _, err := sb.SnapshotDirectory(b.ctx, "/nowhere", nil); err == nil {
		t.Error("a folder that does not exist was kept")
	}
	b.noViolations()
}

func TestSnapshot_OfTheExit(t *testing.T) {
	b := newBed(t)
	params := &modal.SandboxCreateParams{BlockNetwork: true, ExperimentalOptions: map[string]any{"enable_exit_snapshot": true}}
	sb := b.create(params)
	b.expect(sb, "echo last > /root/words; echo ok", "ok")
	if _, err := sb.Terminate(b.ctx, nil); err != nil {
		t.Fatal(err)
	}
	image, err := sb.ExperimentalGetExitSnapshot(b.ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	b.expect(b.createFrom(image, nil), "cat /root/words", "last")

	lost := b.create(params)
	b.post(t, "/sandboxes/"+lost.SandboxID+"/end", object{"how": "preempted"})
	var failed modal.SnapshotCreationError
	if _, err := lost.ExperimentalGetExitSnapshot(b.ctx, nil); !errors.As(err, &failed) {
		t.Errorf("the exit snapshot of a preempted sandbox: %v", err)
	}
}

func TestSnapshot_OfARestoredSandboxIsDeletedAlone(t *testing.T) {
	b := newBed(t)
	first, err := b.create(nil).SnapshotFilesystem(b.ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	restored := b.createFrom(first, nil)
	b.expect(restored, "echo more > /root/more; echo ok", "ok")
	second, err := restored.SnapshotFilesystem(b.ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := restored.Terminate(b.ctx, nil); err != nil {
		t.Fatal(err)
	}
	if err := b.client.Images.Delete(b.ctx, second.ImageID, nil); err != nil {
		t.Fatal(err)
	}
	b.expect(b.createFrom(first, nil), "ls /root", "")
}

func TestSnapshot_CanBeDeletedBeforeWhatWasMadeOfIt(t *testing.T) {
	b := newBed(t)
	first, err := b.create(nil).SnapshotFilesystem(b.ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	restored := b.createFrom(first, nil)
	b.expect(restored, "echo more > /root/more; echo ok", "ok")
	second, err := restored.SnapshotFilesystem(b.ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.client.Images.Delete(b.ctx, first.ImageID, nil); err != nil {
		t.Fatal(err)
	}
	b.expect(b.createFrom(second, nil), "cat /root/more", "more")
	b.stop()
	if left := leftOf(t, b.data); len(left) > 0 {
		t.Errorf("these are left: %v", left)
	}
}
