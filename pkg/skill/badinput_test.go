package skill_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/skill"
	"github.com/spoolhq/spool/pkg/skill/skilltest"
)

// refuse checks that Check, Extract and Tar refuse a ZIP, and that nothing is written.
func refuse(t *testing.T, b skilltest.InvalidZIP) {
	t.Helper()
	r, size := bytes.NewReader(b.ZIP), int64(len(b.ZIP))
	parent := skillsFolder(t)
	_, checked := skill.Check(t.Context(), r, size, skill.Limits{})
	_, extracted := skill.Extract(t.Context(), r, size, parent, sum(b.ZIP))
	tarred := skill.Tar(t.Context(), r, size, io.Discard)
	if b.Field == "" {
		b.Field = "zip"
	}
	for by, err := range map[string]error{"Check": checked, "Extract": extracted, "Tar": tarred} {
		var refused *skill.Error
		if !errors.As(err, &refused) || refused.Code != b.Code || refused.Field != b.Field || !strings.Contains(err.Error(), b.Says) {
			t.Errorf("%s: %v, want %s on %s: …%s…", by, err, b.Code, b.Field, b.Says)
			continue
		}
		if m := refused.Error(); len(m) > 600 || strings.ContainsFunc(m, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			t.Errorf("%s: the message cannot be shown to a user: %q", by, m)
		}
	}
	if left, err := os.ReadDir(parent); err != nil || len(left) > 0 {
		t.Errorf("%d files were left, %v", len(left), err)
	}
}

func refuseAll(t *testing.T, list []skilltest.InvalidZIP) {
	t.Helper()
	for _, b := range list {
		t.Run(b.Name, func(t *testing.T) {
			t.Parallel()
			refuse(t, b)
		})
	}
}

// TestCheck_RefusesUnsafeEntries tests paths that leave the folder, and entries that are neither a file nor a folder.
func TestCheck_RefusesUnsafeEntries(t *testing.T) {
	t.Parallel()
	refuseAll(t, skilltest.UnsafeEntryZIPs())
}

// TestCheck_RefusesBombsAndForgedHeaders tests ZIP bombs, headers with false values, and ZIPs that are too large.
func TestCheck_RefusesBombsAndForgedHeaders(t *testing.T) {
	t.Parallel()
	refuseAll(t, skilltest.ForgedArchives())
}

// TestCheck_SizeLimits tests ZIPs that exceed each size limit by one, and a ZIP that is exactly at the limits.
func TestCheck_SizeLimits(t *testing.T) {
	t.Parallel()
	z := skilltest.BuildZIP(skilltest.DocumentEntry(), skilltest.ZIPEntry{Name: "x", Content: skilltest.IncompressibleBytes(10_000), Raw: true}, skilltest.FileEntry("y", strings.Repeat("word ", 1000)))
	size := int64(len(z))
	unpacked := int64(len(skilltest.ValidDocument) + 10_000 + 5000)
	for _, c := range []struct {
		name string
		lim  skill.Limits
		says string // "" if the ZIP is accepted
	}{
		{"all at the limit", skill.Limits{Files: 3, Packed: size, Unpacked: unpacked, Document: int64(len(skilltest.ValidDocument))}, ""},
		{"files", skill.Limits{Files: 2}, "more than 2 files"},
		{"packed", skill.Limits{Packed: size - 1}, fmt.Sprintf("has %d bytes", size)},
		{"unpacked", skill.Limits{Unpacked: unpacked - 1}, "unpacks to more than"},
		{"document", skill.Limits{Document: int64(len(skilltest.ValidDocument)) - 1}, "SKILL.md: has"},
	} {
		_, err := skill.Check(t.Context(), bytes.NewReader(z), size, c.lim)
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	// The size alone is refused, so Check does not read the ZIP.
	_, err := skill.Check(t.Context(), nil, skill.MaxPackedSize+1, skill.Limits{})
	var refused *skill.Error
	if !errors.As(err, &refused) || refused.Code != skill.CodeTooLarge {
		t.Errorf("over 100 MiB: %v", err)
	}
}

// TestCheck_RefusesInvalidDocuments tests a SKILL.md that is missing, that exists twice, that is too large or that
// lacks a field, and names that are equal on some file systems.
func TestCheck_RefusesInvalidDocuments(t *testing.T) {
	t.Parallel()
	refuseAll(t, skilltest.InvalidDocumentZIPs())
}

// TestCheck_EndsWithItsContext tests that Check, Extract and Tar return when their context ends.
func TestCheck_EndsWithItsContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	z := skilltest.BuildZIP(skilltest.DocumentEntry())
	parent := skillsFolder(t)
	_, checked := skill.Check(ctx, bytes.NewReader(z), int64(len(z)), skill.Limits{})
	_, extracted := skill.Extract(ctx, bytes.NewReader(z), int64(len(z)), parent, sum(z))
	for _, err := range []error{checked, extracted, skill.Tar(ctx, bytes.NewReader(z), int64(len(z)), io.Discard)} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	}
	if left, err := os.ReadDir(parent); err != nil || len(left) > 0 {
		t.Errorf("%d files were left, %v", len(left), err)
	}
}
