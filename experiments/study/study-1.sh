#!/bin/sh
# The points of study 1, named before any of them was run. Finished prompts are found in RESULTS, so
# the script may be stopped at any time and started again.
#
#   RESULTS=results sh experiments/study/study-1.sh main|ablation|grid
#
# SAMPLES=20 makes the main part's first prompts of every point; later more of them are added.
set -e
RESULTS=${RESULTS:-results}
run() { "${PYTHON:-python}" run.py -m experiment=study_1 tracker=disabled results="$RESULTS" "$@"; }
three="task.name=ablation task.tasks=[niah_multikey_2,niah_multiquery,vt] length=[8192,32768] samples=20"

case $1 in
main) # eight points, 50 paired prompts a cell; random keeps 0.3, its default
    n="samples=${SAMPLES:-50}"
    run $n selector=full,xattention,strided_k,minmax,oracle_topp,random threshold=0.9
    run $n selector=xattention threshold=0.7,0.5
    ;;
ablation) # three tasks at two lengths, 20 paired prompts a cell
    run $three selector=full
    run $three selector=xattention threshold=0.2,0.3,0.5,0.7,0.8,0.9,0.95,0.99
    run $three selector=xattention threshold=0.9 stride=4,16,32
    run $three selector=xattention threshold=0.9 attend=set
    run $three selector=xattention threshold=0.9 reduce_heads=vote,mean_score
    run $three selector=xattention threshold=0.9 reduce_queries=vote,mean_score
    run $three selector=xattention threshold=0.9 reduce_sub_blocks=vote,mean_score
    run $three selector=xattention,oracle_topp threshold=0.3,0.5,0.7,0.9,0.99 mass_recall=true samples=5
    ;;
grid) # a needle at five depths
    run task=niah task.rounds=4 selector=full
    run task=niah task.rounds=4 selector=xattention threshold=0.9,0.8
    ;;
*)
    sed -n 's/^#   //p' "$0" >&2
    exit 2
    ;;
esac
