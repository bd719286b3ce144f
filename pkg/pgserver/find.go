package pgserver

import (
	"context"
	"os"
)

// FindBinary returns the Postgres binary that Start would run, without creating or downloading anything. It returns
// ErrNoBinary if Start would have to download one.
func FindBinary(ctx context.Context, cfg Config) (string, error) {
	if err := cfg.validate(); err != nil {
		return "", err
	}
	user, err := unprivilegedAccount()
	if err != nil {
		return "", err
	}
	cfg.FetchURL = FetchNever
	s := Server{cfg: cfg}
	major := ""
	if _, err := os.Stat(s.clusterDir()); err == nil {
		major = clusterVersion(s.clusterDir())
	}
	b, err := findBinaries(ctx, cfg, user, major)
	return b.postgres, err
}
