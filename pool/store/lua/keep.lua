-- keep: hold on to an entry that was read and cannot begin yet, so that the sweep does not take it for a dead reader's.
-- KEY queue stream
-- ARG rank str
-- ARG entry str
-- FLAGS allow-oom
-- RETURN {"ok"} | {"lost"} when another rank, or nobody, has it now
local owned = redis.pcall('XPENDING', queue, 'workers', entry, entry, 1, rank)
if owned.err or #owned == 0 then return {'lost'} end
redis.call('XCLAIM', queue, 'workers', rank, 0, entry, 'JUSTID')
return {'ok'}
