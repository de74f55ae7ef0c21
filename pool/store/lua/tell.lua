-- tell: how full a rank is, for the others of its model to compare with.
-- KEY load hash rank -> `IN_FLIGHT SLOTS`
-- ARG rank str
-- ARG inflight num generations it has
-- ARG slots num that it may have
-- ARG keep ms until all is forgotten unless a rank tells anything
-- FLAGS allow-oom
-- RETURN {"ok"}
redis.call('HSET', load, rank, inflight .. ' ' .. slots)
redis.call('PEXPIRE', load, keep)
return {'ok'}
