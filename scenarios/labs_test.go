package scenarios

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"mailproof/history"
	"mailproof/verify"
)

func TestEachLabHasANameOfTheRequirements(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, x := range allStories() {
		require.True(t, strings.HasPrefix(x.name, "lab-"), x.name)
		require.False(t, seen[x.name], x.name)
		require.NotContains(t, x.want, seenMark)
		require.NotNil(t, x.tell, x.name)
		require.True(t, x.want != "" && x.what != "", x.name)
		seen[x.name] = true
	}
}

func TestStoriesAreChosenByName(t *testing.T) {
	t.Parallel()
	names := func(asked ...string) []string {
		chosen, err := Select(All(Draw{}), asked)
		require.NoError(t, err)
		require.Len(t, chosen, 1)
		require.Equal(t, labsName, chosen[0].Name)
		require.Equal(t, len(chosen[0].FaultNames), chosen[0].Floors.Faults)
		require.Len(t, chosen[0].Proves, len(chosen[0].FaultNames))
		return chosen[0].FaultNames
	}
	require.Equal(t, []string{"lab-four"}, names("lab-four"))
	require.Equal(t, []string{"lab-claim", "lab-four"}, names("lab-four", "lab-claim"))
	require.Equal(t, storyNames(), names("lab"))
	require.Equal(t, storyNames(), names("lab-four", "lab"))
	require.Equal(t, storyNames(), names("lab/resend"))
}

// An outcome that was not seen is a finding, whatever else was.
func TestLabsAreJudgedByWhatWasSeen(t *testing.T) {
	t.Parallel()
	judge := func(faults ...history.Fault) ownFindings {
		var own ownFindings
		judgeLabs(&history.History{Faults: faults}, &own)
		return own
	}
	x := storiesOf([]string{"lab-four"})[0]
	good := judge(history.Fault{Name: x.name, Witness: "expected outcome: " + x.want + "; " + seenMark + x.want})
	require.Empty(t, good.Findings)
	require.Len(t, good.checked, 1)
	require.Equal(t, "LAB-FOUR", good.checked[0].Name)
	require.Equal(t, 1, good.checked[0].Looked)
	bad := judge(history.Fault{Name: x.name, Witness: "expected outcome: " + x.want + "; " + seenMark + "sent CANCELLED"})
	require.Len(t, bad.Findings, 1)
	require.Equal(t, verify.Fail, bad.Findings[0].Verdict)
	require.Contains(t, bad.Findings[0].Text, "sent CANCELLED")
	none := judge(history.Fault{Name: x.name, Reason: "witness: the database is away"})
	require.Empty(t, none.Findings, "a fault without a witness is the judge's of every scenario")
	require.Zero(t, none.checked[0].Looked)
}
