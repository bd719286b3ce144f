package fold

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// TestDay_EqualsTheFormattedDay tests that the remembered day is used only for times of that day.
func TestDay_EqualsTheFormattedDay(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		m := New(0, 1)
		seconds := rapid.OneOf(rapid.Int64(), rapid.Int64Range(-200_000, 200_000), rapid.Int64Range(-62_135_700_000, -62_135_500_000), rapid.SampledFrom([]int64{0, -1, 86_399, 86_400}))
		for _, s := range rapid.SliceOfN(seconds, 1, 20).Draw(t, "times") {
			at := time.Unix(s, 999_999_999).In(time.FixedZone("", 5*3600))
			if got, want := m.cachedUTCDay(at), utcDay(at); got != want {
				t.Fatalf("%s: got %s, want %s", at, got, want)
			}
		}
	})
}
