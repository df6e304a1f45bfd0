package target_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/fakes/smtp"
	"mailproof/history"
	"mailproof/target"
)

func recipients(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("reader%d@example.test", i)
	}
	return out
}

// awaitCampaign waits until the campaign's counts are as wanted.
func awaitCampaign(t *testing.T, p *target.Pipeline, id string, done func(target.CampaignCounts) bool) target.CampaignCounts {
	t.Helper()
	var last target.CampaignCounts
	require.Eventually(t, func() bool {
		var err error
		last, err = p.CampaignState(t.Context(), id)
		return err == nil && done(last)
	}, time.Minute, 50*time.Millisecond, "%+v", last)
	return last
}

// A campaign in one call, repeated with more recipients, beside tickets: each
// recipient has one mail, known to the mail server by its key.
func TestCampaign(t *testing.T) {
	server, j := mailServer(t), &journal{}
	p := start(t, config(t, "camp", server, j))
	to := recipients(600) // more than one batch
	r, outcome := p.Campaign(t.Context(), "spring", to[:500])
	require.Equal(t, history.OpOK, outcome)
	require.Equal(t, target.CampaignResult{Read: 500, New: 500}, r)
	tickets := confirm(t, p, 3)
	r, outcome = p.Campaign(t.Context(), "spring", append(slices.Clone(to), "Reader0@EXAMPLE.test"))
	require.Equal(t, history.OpOK, outcome)
	require.Equal(t, target.CampaignResult{Read: 601, New: 100, Known: 501}, r)

	c := awaitCampaign(t, p, "spring", func(c target.CampaignCounts) bool { return c.Counts["sent"] == 600 })
	require.EqualValues(t, 600, c.Total)
	require.EqualValues(t, 600, c.AtRest())
	require.False(t, c.Stopped)
	require.False(t, c.FirstSent.Before(*c.FirstAccepted))
	settle(t, p)
	for _, address := range to {
		require.Equal(t, 1, server.Verdict(p.CampaignKey("spring", address)).Copies, address)
	}
	for _, k := range tickets {
		require.Equal(t, 1, server.Verdict(k).Copies, k)
	}
}

// C-14: a campaign stopped before anything could be sent: no mail goes, no row
// is lost, and no mail is taken in any more.
func TestCampaignStopped(t *testing.T) {
	server, j := mailServer(t), &journal{}
	p := start(t, config(t, "stop", server, j))
	_, outcome, err := p.CampaignWhy(t.Context(), target.CampaignRequest{
		ID: "spring", SendAfter: time.Now().Add(3 * time.Second), Recipients: slices.Values(recipients(50)),
	})
	require.NoError(t, err)
	require.Equal(t, history.OpOK, outcome)
	require.Equal(t, history.OpOK, p.StopCampaign(t.Context(), "spring"))
	_, outcome, err = p.CampaignWhy(t.Context(), target.CampaignRequest{ID: "spring", Recipients: slices.Values(recipients(60))})
	require.Equal(t, history.OpFail, outcome)
	require.ErrorContains(t, err, "stopped")
	c := awaitCampaign(t, p, "spring", func(c target.CampaignCounts) bool { return c.Counts["cancelled"] == 50 })
	require.EqualValues(t, 50, c.Total)
	require.True(t, c.Stopped)
	require.Empty(t, server.LedgerSince(0))
}

// What a harness is told when a call cannot be right.
func TestCampaignRefused(t *testing.T) {
	server, j := mailServer(t, smtp.On(smtp.StageRcpt, smtp.Reply).Code(550).Rule()), &journal{}
	p := start(t, config(t, "refuse", server, j))
	_, outcome, err := p.CampaignWhy(t.Context(), target.CampaignRequest{ID: "a:b", Recipients: slices.Values(recipients(1))})
	require.Equal(t, history.OpFail, outcome)
	require.ErrorContains(t, err, "letters, digits")
	r, outcome, err := p.CampaignWhy(t.Context(), target.CampaignRequest{ID: "x", Recipients: slices.Values([]string{"a@example.test", "nobody"})})
	require.Equal(t, history.OpUnknown, outcome, "the line before it was accepted")
	require.ErrorContains(t, err, "line 2")
	require.NotContains(t, err.Error(), "nobody")
	require.Equal(t, 1, r.New)
	awaitCampaign(t, p, "x", func(c target.CampaignCounts) bool { return c.Counts["dead"] == 1 })
}
