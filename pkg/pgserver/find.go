package pgserver

import (
	"context"
	"os"
)

// Find gives the Postgres binary that Start would run on this machine, without
// making or fetching anything; ErrNoBinary if Start would have to fetch one.
func Find(ctx context.Context, cfg Config) (string, error) {
	if err := cfg.validate(); err != nil {
		return "", err
	}
	user, err := unprivileged()
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
