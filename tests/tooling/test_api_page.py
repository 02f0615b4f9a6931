"""docs/api.md names what is there: every name of ours in it can be imported."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import kv_core
from kv_core.manager import KVCacheManager

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(r"^\| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
MODULES = {
    info.name: importlib.import_module(f"kv_core.{info.name}") for info in pkgutil.iter_modules(kv_core.__path__)
}
NAMED = sorted({name for row in ROWS for name in re.findall(r"`([^`(]+)[^`]*`", row[2])})


SEED = re.findall(
    r"\w+",
    """
    addBlockToAllBeams addBlockToBeam addNextBlock addSequence addToken adjustBlocksIfNeeded allocateBlock
    allocatePools blockInRadixTree buildBlockKeys calculateFreeMemBytes calculateMaxBlockRequirements
    calculateMaxBlockRequirementsPerBeam calculateMaxNumBlocks calculateWindowSizeToShare copyBlockOffsets
    createBlockScalePools createIndexerKCachePools decRefCount decSchedulingRefCount detachFrontBlock
    findBlocksInReuseTreeByBlockKey findMatchingBlock findNewContextBlock freeChildren freeLeafBlock
    generateBlockHashExtraKeys getAllSequenceBlocks getBatchCacheBlockIds getBlockId getBlockKey
    getBlockOffsetsOfBatch getCacheBlockIds getDurationMs getExpirationTime getExtraKeys getFreeBlock getHash
    getIndexerKCachePool getLastBlockId getLatestEvents getMaxCapacityBatchSize getMemoryPoolBlockIndex
    getNeededBlocksOneStep getNextBlocks getNthByte getPrevBlock getPrevBlockInSeq getPrimaryPool getPriority
    getRemainingBlocksToCompletion getSequence getSinkBubbleLength getUniquePrimaryPool getUniqueTokens
    groupLayersByWindowSize hasRefs hasSchedulingRefs incRefCount isFull isLeaf isPrimary isShared
    isSortedVectorIdenticalAcrossAllRanks loadOrAllocateBlocks offloadBlock onboardBlock pinBlocks refreshBlocks
    releaseBlocks releaseLastBlock releasePools removeNextBlock removeSequence removeToken replaceSharedBlock
    rewindKVCache schedulingReleaseBlocks schedulingRemoveSequence setBlockKey setDurationMs setExpirationTime
    setHash setOffsets setPrevBlock setPrevBlockInSeq setPriority startScheduling storeBlocks storeBlocksForReuse
    storeContextBlocks storeNewBlock swapMemoryPoolBlockOffset syncTransferManagerWithBufferManager unpinBlocksById
    updateCacheBlockOffsetsAtIdx updateLastCacheBlockOffsets updateSequenceCacheBlockOffsets verifyQueueIntegrity
""",
)
"""Functions of the seed's cache manager, those of its blocks, windows and managers together."""


def found(name):
    """Whether a module of ours, the manager, or a class or function of any module of kv_core has this name."""
    first, _, rest = name.partition(".")
    if first == "kv_transfer":
        return (ROOT / f"packages/kv-transfer/src/kv_transfer/{rest.replace('.', '/')}.py").is_file()
    if first == "manager" and hasattr(KVCacheManager, rest):
        return True
    if first in MODULES:
        return not rest or hasattr(MODULES[first], rest)
    return any(not rest or hasattr(vars(module)[first], rest) for module in MODULES.values() if first in vars(module))


@pytest.mark.parametrize("name", NAMED)
def test_the_name_exists(name):
    assert found(name)


def test_a_name_that_is_not_there_is_noticed():
    assert not found("manager.pinBlocks")
    assert not found("Run.shifted")
    assert not found("Unheard")


def test_every_function_of_the_seed_has_a_row():
    named = {name for row in ROWS for name in re.findall(r"\w+", row[0])}
    assert [name for name in SEED if name not in named] == []


def test_every_row_has_the_rule_it_follows_and_something_of_ours():
    assert len(ROWS) > 60
    for seed, section, ours in ROWS[1:]:
        if seed not in ("seed", "---") and not set(section) <= {"-"}:
            assert re.search(r"\d", section) or section == "section", seed
            assert "`" in ours or section == "section", seed
